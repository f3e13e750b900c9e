"""What is fast where it counts: the actor, the update, a policy on its way."""
