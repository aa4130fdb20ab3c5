"""Metrics as dashboards and alerts use them, and the story of a job in samples."""
