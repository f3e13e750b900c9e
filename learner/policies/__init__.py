"""A policy's way out of the learner: converted, gated, numbered, signed and sent."""
