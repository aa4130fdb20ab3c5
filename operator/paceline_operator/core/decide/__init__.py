"""Single decisions: who lives, what is made and deleted, when a job ends or is suspended."""
