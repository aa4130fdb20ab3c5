"""Manifests of the objects that belong to a job: its pods and the objects beside them."""
