"""Tests of edge_actor/policies."""
