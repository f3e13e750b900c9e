"""A learner dies or stands still, or its workers do: who goes on, with what, and that nothing is lost."""
