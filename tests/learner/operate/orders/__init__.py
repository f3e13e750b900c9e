"""Tests of learner/operate/orders."""
