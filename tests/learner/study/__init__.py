"""Tests of learner/study."""
