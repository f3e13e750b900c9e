"""Tests of edge_actor/fleet."""
