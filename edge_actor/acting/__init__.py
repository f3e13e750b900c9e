"""The hot loop: observation to action to step, with exploration, pace and what is done when the environment fails."""
