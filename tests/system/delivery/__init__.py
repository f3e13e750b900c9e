"""Nothing is lost and nothing counts twice."""
