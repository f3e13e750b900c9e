"""Draws the pictures of the documents."""
