"""What the children of a job look like: manifests of its pods and of the objects beside them."""
