"""QuaRL's study as one command: many policies, each in many precisions, played in the same episodes."""
