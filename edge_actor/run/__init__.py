"""The actor as a whole: wired, run, and checked before that."""
