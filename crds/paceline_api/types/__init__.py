"""The kinds of Paceline as frozen models: fields with their descriptions and bounds."""
