"""Individual decisions: which pods live, what to create and delete, when a job ends or suspends."""
