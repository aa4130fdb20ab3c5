"""What one step is made of: samples of a rank, dissected; those of a whole job, compared. Pure."""
