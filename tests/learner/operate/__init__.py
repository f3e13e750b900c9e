"""Tests of learner/operate."""
