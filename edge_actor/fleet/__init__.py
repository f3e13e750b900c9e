"""The messages of actor and learner to each other, but for experience and policies."""
