"""Tests of learner/experience."""
