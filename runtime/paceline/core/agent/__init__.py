"""Decisions of an agent: life cycle, ends and networks of its rank processes."""
