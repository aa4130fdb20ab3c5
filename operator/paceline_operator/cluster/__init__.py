"""Drivers: watches, writes, the Lease, and the connection to each job's coordinator.

They carry out what `core` has decided and hold no opinion of their own.
"""
