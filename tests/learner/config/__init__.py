"""Tests of learner/config."""
