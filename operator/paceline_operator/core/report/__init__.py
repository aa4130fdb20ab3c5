"""What the user reads of it: status, conditions and Events."""
