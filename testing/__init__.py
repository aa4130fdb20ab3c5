"""Code that tests and benchmarks share: a Kubernetes, stand-ins, forked processes, the simulation.

No part of the product imports this package, and it is not in the wheel. It imports the product, and
neither tests nor benchmarks.
"""
