"""Tests of edge_actor/run."""
