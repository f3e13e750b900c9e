"""Orders of people to this actor: written down, carried out at most once, answered."""
