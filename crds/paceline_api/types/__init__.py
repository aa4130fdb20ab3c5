"""TrainingJob and FabricProfile as frozen models: fields with their descriptions and bounds."""
