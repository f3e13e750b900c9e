"""`actorq-learner quantize`: models that come from elsewhere."""
