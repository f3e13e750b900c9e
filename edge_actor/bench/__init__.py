"""Measures what policies cost on this board: time, memory, energy, and how well a control rate is held."""
