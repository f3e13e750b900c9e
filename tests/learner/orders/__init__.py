"""Tests of learner/orders."""
