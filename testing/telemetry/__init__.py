"""What dashboards and alerts know of the metrics, and a job's story in samples."""
