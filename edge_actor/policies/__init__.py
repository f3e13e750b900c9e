"""A policy's way on the actor: received, verified, put together, built and run by a TFLite interpreter."""
