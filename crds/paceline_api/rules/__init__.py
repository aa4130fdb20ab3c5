"""Validation rules that the type of a single field cannot express, in Python and in CEL."""
