"""Runtimes: what a platform team says once for all jobs, and how a job is merged with it."""
