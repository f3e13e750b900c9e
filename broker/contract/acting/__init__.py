"""What an actor works out as it acts, and a learner again: random draws, and probabilities of several choices."""
