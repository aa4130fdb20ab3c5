"""Runs the command line with the caller's Python interpreter: `python -m paceline`."""

from paceline.cli.main import main

main()
