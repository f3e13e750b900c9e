"""Tests of learner/commands."""
