"""The way to an API server, for operator and command line: one kubeconfig, one login, one truth.

Whoever uses it needs the extra `kubernetes`; the API types themselves do not import it.
"""
