"""Tests of learner/files."""
