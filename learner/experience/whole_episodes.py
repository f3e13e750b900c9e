"""Episodes that one policy played from beginning to end."""

from __future__ import annotations

from broker.contract import messages


class WholeEpisodes:
    """Follows the episodes of one actor, by its messages of one policy, in their order.

    Attributes:
        begun: Environments whose episode that policy began.
    """

    def __init__(self) -> None:
        self.begun: set[int] = set()

    def add(self, experience: messages.Experience) -> list[tuple[int, float]]:
        """Takes in a message; returns environment and return of each episode that ended in it and had begun here."""
        ended: list[tuple[int, float]] = []
        ends = (experience.terminated | experience.truncated).tolist()
        columns = (experience.env_index, experience.length, experience.episode_length, experience.episode_return)
        for is_end, env, steps, age, total in zip(ends, *(column.tolist() for column in columns), strict=True):
            if steps == age and env < messages.MAX_ENVS:
                self.begun.add(env)
            if is_end and env in self.begun:
                self.begun.discard(env)
                ended.append((env, total))
        return ended
