"""Tests of edge_actor/acting."""
