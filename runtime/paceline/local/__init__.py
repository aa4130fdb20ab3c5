"""Runner of a job on this machine: its processes, its folder, and what the user sees."""
