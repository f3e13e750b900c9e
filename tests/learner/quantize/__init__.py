"""Tests of learner/quantize."""
