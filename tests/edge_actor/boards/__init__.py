"""Recorded files of boards."""
