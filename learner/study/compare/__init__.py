"""`actorq-learner compare`: whole fleets in turn, one precision after the other, and what came of each beside another.

docs/learning/compare.md says how runs are made, in which two regimes, and how intervals come about.
"""
