"""Process of a job's coordinator: HTTP server, configuration and metrics."""
