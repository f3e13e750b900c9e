"""Environments whose trajectories are known, and those that go wrong."""
