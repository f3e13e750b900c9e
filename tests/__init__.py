"""Tests: one folder per package, and the whole system."""
