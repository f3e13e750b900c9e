"""Tests of learner/study/compare."""
