"""The commands of `actorq-learner`: a module each, with `add` for its arguments and `run` for what it does."""
