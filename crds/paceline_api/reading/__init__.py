"""Reading of a job file: text to a TrainingJob, or to all its errors with field and line."""
