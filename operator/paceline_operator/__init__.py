"""The Kubernetes operator: TrainingJobs in, pods out.

`core` decides (pure), `cluster` talks to the API server and to coordinators, `handlers` connects
the two through one queue keyed by job. `python -m paceline_operator` runs it.
"""
