"""Tests of broker/fleet."""
