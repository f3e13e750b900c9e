"""Tests of learner/experience/buffers."""
