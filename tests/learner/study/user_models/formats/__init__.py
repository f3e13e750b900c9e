"""Readers of policies that other libraries saved."""
