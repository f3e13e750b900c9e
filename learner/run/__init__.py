"""A training run: the loop, its metrics, its console, and the fleet on one machine."""
