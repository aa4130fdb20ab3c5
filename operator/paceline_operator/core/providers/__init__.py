"""Who starts the workers of a job: gang schedulers and Kueue, one object each."""
