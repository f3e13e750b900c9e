"""Reports of a run, for people: console, metrics, notices, progress, energy and summary."""
