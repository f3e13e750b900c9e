"""Tests of learner/run/workers."""
