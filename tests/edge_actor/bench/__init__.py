"""Tests of edge_actor/bench."""
