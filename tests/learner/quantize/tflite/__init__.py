"""Tests of learner.quantize.tflite."""
