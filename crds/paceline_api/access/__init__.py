"""Access to an API server, shared by the operator and the command line: kubeconfig and login.

Users of this package need the extra `kubernetes`; the API types themselves do not import it.
"""
