"""Tests of learner/algorithms."""
