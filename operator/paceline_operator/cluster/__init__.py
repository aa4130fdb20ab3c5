"""Drivers: watches, writes, the Lease, and the connection to each job's coordinator.

They carry out the decisions of `core` and decide nothing about a job themselves.
"""
