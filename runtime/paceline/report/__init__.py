"""The report on a run: a page without scripts or network access, and a trace for Perfetto.

All functions return text.
"""
