"""Tests of edge_actor/experience."""
