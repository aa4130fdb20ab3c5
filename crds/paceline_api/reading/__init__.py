"""From the text of a job file to a TrainingJob, or to every mistake in it with field and line."""
