"""Jobs of a cluster: requests to the API server, made as the user of the kubeconfig."""
