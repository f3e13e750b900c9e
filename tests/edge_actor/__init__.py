"""Tests of the actor."""
