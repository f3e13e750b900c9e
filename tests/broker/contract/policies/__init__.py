"""Tests of broker/contract/policies."""
