"""Whether actors act as they were told: steps are computed again, and what cannot be true is held back."""
