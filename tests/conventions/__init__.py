"""Tests of the code itself: what it may import, what its constructors may do, which documents and files it has."""
