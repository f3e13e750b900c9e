"""Tests of learner.quantize.distil."""
