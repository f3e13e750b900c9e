"""Tests of broker/serve."""
