"""Tests with real processes and real brokers."""
