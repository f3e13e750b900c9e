"""`actorq-learner quantize`: policies that come from elsewhere."""
