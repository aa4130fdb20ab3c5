"""The Kubernetes operator (its place; it comes with the cluster work)."""
