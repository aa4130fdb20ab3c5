"""Training API: optimizer, loader and job functions that a script uses in each rank."""
