"""The contract of each back end of the job commands, and stand-ins for their servers."""
