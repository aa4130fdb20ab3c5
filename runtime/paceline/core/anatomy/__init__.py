"""The anatomy of a step: the samples of one rank split into parts, and those of all ranks compared.

Pure functions over plain data.
"""
