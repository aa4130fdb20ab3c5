"""What each back end of the verbs for jobs must do, and stand-ins for what they talk to."""
