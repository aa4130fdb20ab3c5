"""What dashboards and alerts use of the metrics, and the story of a job in samples."""
