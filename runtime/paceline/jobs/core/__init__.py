"""Decisions and texts that both back ends share: plain data in, data or text out."""
