"""The API of Paceline: the fields of a TrainingJob, their defaults, and the rules that it obeys.

`reading.load` reads a job file, `resolve` turns a job into the plain settings that the runtime
works with, and `crdgen` writes the CustomResourceDefinitions. The runtime and the operator share
this package only.
"""
