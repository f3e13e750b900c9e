"""Tests of edge_actor/updates."""
