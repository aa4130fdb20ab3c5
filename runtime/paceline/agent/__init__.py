"""The agent of a pod, which starts, supervises and ends the rank processes of a job."""
