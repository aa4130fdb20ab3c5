"""TrainingJob and FabricProfile as frozen models: each field with its text, bounds and words."""
