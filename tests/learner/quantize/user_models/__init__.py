"""Tests of learner.quantize.user_models."""
