"""A report on a run: one page without scripts or network, and a trace for Perfetto. Text out."""
