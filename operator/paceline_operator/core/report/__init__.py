"""The parts of a decision that users read: status, conditions and Events."""
