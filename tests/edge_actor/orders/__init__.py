"""Tests of edge_actor/orders."""
