"""Runs on the desktop: ingests experience, trains in fp32, quantizes, publishes. Never imports an environment."""
