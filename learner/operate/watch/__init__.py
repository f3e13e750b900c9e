"""A page, and metrics, of a fleet as it is: read off the broker by a member that may only read."""
