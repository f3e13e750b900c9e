"""Tests of learner/run."""
