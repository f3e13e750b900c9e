"""Payloads for tests: one of every kind with its bytes, those of the schema before, random ones, and damaged ones."""
