"""Tests of learner/networks/losses."""
