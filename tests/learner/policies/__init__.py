"""Tests of learner/policies."""
