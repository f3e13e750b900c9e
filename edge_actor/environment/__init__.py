"""Environments by name, held to what they declare. The only folder that imports Gymnasium."""
