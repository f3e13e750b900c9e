"""What the actor and its learner say to each other, but for experience and policies."""
