"""Kills, cuts and fills everything, and counts what is lost: `python -m tests.system.chaos`."""
