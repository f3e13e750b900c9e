"""The learner's side of the fleet: its connections, who is in it, and what each actor is assigned."""
