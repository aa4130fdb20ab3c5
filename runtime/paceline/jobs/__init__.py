"""Jobs of this machine and jobs of a cluster through one set of verbs (`interface.Jobs`).

The command line and the Python SDK are built on it. Decisions and texts are in `core`; `cluster`
needs the extra `kubernetes` and is imported only when a cluster is meant.
"""
