"""Readers of policies that other libraries saved: each gives the layers of `chain`, and executes nothing of a file."""
