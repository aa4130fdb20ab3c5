"""What tests and benchmarks share: a Kubernetes, an operator's world in memory, forked processes.

No part of the product imports this package, and it is not in the wheel. It imports the product, and
neither tests nor benchmarks.
"""
