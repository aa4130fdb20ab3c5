"""Pure forecasts of a job at another size or in another mode, from measured runs."""
