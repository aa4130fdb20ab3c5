"""Gang schedulers and Kueue, which decide when a job's workers start: one object for each."""
