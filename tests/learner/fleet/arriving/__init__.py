"""Tests of learner/fleet."""
