"""Tests of edge_actor/board."""
