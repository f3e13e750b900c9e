"""Counterparts for tests and benchmarks: simulated actors and learners, plain clients, odd environments."""
