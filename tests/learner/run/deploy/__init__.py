"""Tests of learner/run/deploy."""
