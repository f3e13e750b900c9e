"""Tests of learner/study/sweep."""
