"""The Kubernetes operator: it creates and manages the pods of TrainingJobs.

`core` decides (pure functions), `cluster` talks to the API server and to coordinators, and
`handlers` and `controller` connect the two through one queue keyed by job. `python -m
paceline_operator` runs it.
"""
