"""Metrics of a rank: the catalog, the records in shared memory, and the page for Prometheus."""
