"""Tests of broker/contract."""
