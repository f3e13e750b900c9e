"""Files of a run: its directory, checkpoints and records."""
