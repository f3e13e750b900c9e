"""Tests of learner/run/loop."""
