"""Tests of the fleet's page."""
