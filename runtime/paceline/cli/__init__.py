"""The command line `paceline`: options, output for people and programs, exit codes."""
