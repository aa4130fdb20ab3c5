"""Jobs of a cluster: what the API server is asked, as the user of the kubeconfig."""
