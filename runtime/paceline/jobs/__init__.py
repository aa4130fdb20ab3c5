"""Jobs on this machine and jobs in a cluster, behind one interface (`interface.Jobs`).

The command line and the Python SDK are built on this package. Decisions and texts are in `core`.
`cluster` needs the extra `kubernetes` and is imported only when a cluster is addressed.
"""
