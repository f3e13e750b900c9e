"""Tests of learner/audit."""
