"""The API of Paceline: what a TrainingJob is, what it defaults to, and what is wrong with one.

`load` reads a job file, `resolve` turns a job into the plain settings that the runtime works with,
`crdgen` writes the CustomResourceDefinition. Runtime and operator meet only here.
"""
