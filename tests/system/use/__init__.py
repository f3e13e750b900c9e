"""Whole fleets as a user runs them."""
