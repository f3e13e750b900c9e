"""Tests of learner/networks."""
