"""Tests of broker/mqtt."""
