"""Tests of broker/program."""
