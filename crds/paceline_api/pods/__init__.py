"""What a pod template says, and what Kubernetes makes of it: defaults, levels, what it needs."""
