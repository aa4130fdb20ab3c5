"""The command line under the Python of its caller: `python -m paceline.cli`."""

from paceline.cli.main import main

main()
