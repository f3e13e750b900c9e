"""Tests of edge_actor/environment."""
