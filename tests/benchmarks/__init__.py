"""Benchmarks: one JSON object per line."""
