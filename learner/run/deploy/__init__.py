"""`actorq-learner deploy`: a policy from a file to a fleet, without training."""
