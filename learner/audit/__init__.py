"""Checks whether actors act as they were told: steps are computed again, what cannot be true is held back; who drifts."""
