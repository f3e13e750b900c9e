"""Environments whose trajectories can be written down by hand."""

from __future__ import annotations

import collections
import copy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Countdown(gymnasium.Env[Any, Any]):
    """Episode k lasts `lengths[k % len]` steps and ends as `ends[k % len]` says: T, or t for truncated.

    Observation is [episode, step], reward of step s is s + 1, plus 100 times the action.
    """

    observation_space: spaces.Space[Any] = spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, lengths: tuple[int, ...] = (3,), ends: str = "T") -> None:
        self.lengths, self.ends = lengths, ends
        self.episode, self.now = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.now = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.now += 1
        over = self.now == self.lengths[self.episode % len(self.lengths)]
        how = self.ends[self.episode % len(self.ends)]
        reward = self.now + 100.0 * float(action)
        return np.array([self.episode, self.now], np.float32), reward, over and how == "T", over and how == "t", {}


class Flaky(Countdown):
    """Raises at every `period`-th step of the process."""

    taken = 0

    def __init__(self, period: int = 5) -> None:
        super().__init__((4,))
        self.period = period

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Flaky.taken += 1
        if Flaky.taken % self.period == 0:
            raise OSError("the wheel came off")
        return super().step(action)


class Arm(gymnasium.Env[Any, Any]):
    """Has the spec of simulated actors; episodes of 200 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (24,), np.float32)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._now = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._now += 1
        return self._observe(), float(action), False, self._now == 200, {}

    def _observe(self) -> np.ndarray[Any, Any]:
        return self.np_random.standard_normal(24).astype(np.float32)


class Ragged:
    """Fails at whatever is done with it."""

    def __array__(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError("no array of mine")

    def __repr__(self) -> str:
        raise RuntimeError("no words either")


ODD: dict[str, tuple[str, Any]] = {
    "reward nan": ("reward", float("nan")),
    "reward inf": ("reward", float("-inf")),
    "reward 1e39": ("reward", 1e39),
    "reward 2e9": ("reward", np.float64(2e9)),
    "reward huge": ("reward", 10**400),
    "reward None": ("reward", None),
    "reward text": ("reward", "3.5"),
    "reward two": ("reward", np.ones(2)),
    "reward complex": ("reward", 1j),
    "reward ragged": ("reward", Ragged()),
    "observation nan": ("observation", np.array([0, np.nan], np.float32)),
    "observation inf": ("observation", np.array([0, np.inf], np.float32)),
    "observation 1e39": ("observation", np.array([0, 1e39])),
    "observation None": ("observation", None),
    "observation short": ("observation", np.ones(1, np.float32)),
    "observation single": ("observation", np.float32(1)),
    "observation long": ("observation", np.ones((2, 2), np.float32)),
    "observation text": ("observation", np.array(["1", "2"])),
    "observation objects": ("observation", np.array([1, None], object)),
    "observation complex": ("observation", np.array([1j, 2])),
    "observation uneven": ("observation", [[1.0], [2.0, 3.0]]),
    "observation ragged": ("observation", Ragged()),
    "terminated text": ("terminated", "no"),
    "terminated nan": ("terminated", float("nan")),
    "truncated two": ("truncated", np.array([True, False])),
    "truncated 7": ("truncated", 7),
}


class Odd(Countdown):
    """Answers something odd (of ODD) at its step number `at`, counted from 1; sound are three steps an episode."""

    def __init__(self, what: str = "reward nan", at: int = 3) -> None:
        super().__init__((3,), "Tt")
        self.odd, self.at, self.taken = ODD[what], at, 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        names = ("observation", "reward", "terminated", "truncated", "info")
        answer = dict(zip(names, super().step(action), strict=True))
        self.taken += 1
        if self.taken == self.at:
            answer[self.odd[0]] = self.odd[1]
        return tuple(answer.values())


class OddOnes(Odd):
    """Is made with one oddity of ODD after another."""

    made = 0

    def __init__(self, at: int = 50) -> None:
        super().__init__(list(ODD)[OddOnes.made % len(ODD)], at)
        OddOnes.made += 1


class Stuck(Odd):
    """Cannot be closed."""

    def close(self) -> None:
        raise OSError("busy")


class OldGym(Countdown):
    """Answers as Gym did before Gymnasium."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class OldReset(Countdown):
    """Answers with an observation alone, as Gym did."""

    def reset(self, **arguments: Any) -> Any:
        return super().reset(**arguments)[0]


class Leaving(Countdown):
    """Ends the process, or so it thinks."""

    def step(self, action: Any) -> Any:
        raise SystemExit(3)


class Frames(Countdown):
    """Observes a screen, as Atari has it."""

    observation_space = spaces.Box(0, 255, (210, 160, 3), np.uint8)
    screen = np.zeros((210, 160, 3), np.uint8)

    def reset(self, **arguments: Any) -> Any:
        return self.screen, super().reset(**arguments)[1]

    def step(self, action: Any) -> Any:
        return self.screen, *super().step(action)[1:]


class Panorama(Frames):
    """Observes what no message can hold twice."""

    def __init__(self, elements: int = 12_000_000) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-1, 1, (elements,), np.float32)


class Robot(gymnasium.Env[Any, Any]):
    """Continuous actions in [-1, 2] x [0, 1]; keeps what it was given."""

    observation_space = spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(-1, 1, (2,), np.float64)})
    action_space = spaces.Box(np.array([-1, 0], np.float32), np.array([2, 1], np.float32))

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def _observe(self) -> dict[str, Any]:
        return {"b": 1, "a": np.array([0.25, -0.5])}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        return self._observe(), 0.0, False, False, {}


class Endless(gymnasium.Env[Any, Any]):
    """Its episodes never end; the spec is CartPole's."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(4, np.float32), 1.0, False, False, {}


class Text(Robot):
    """Observes what cannot be carried."""

    observation_space = spaces.Text(5)  # type: ignore[assignment]


class Chatter(Robot):
    """Takes what cannot be carried."""

    action_space = spaces.Text(5)  # type: ignore[assignment]


class Arcade(Robot):
    """Has more buttons than an action may have elements."""

    action_space = spaces.MultiBinary(1025)  # type: ignore[assignment]


class Mixed(Robot):
    """Takes a choice and a float at once."""

    action_space = spaces.Dict(  # type: ignore[assignment]
        {"gear": spaces.Discrete(3), "grip": spaces.Box(-1, 1, (1,), np.float32)}
    )


class Taker(Robot):
    """Takes actions of a space of one's choice, and refuses all that lie outside."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.action_space = ACTIONS[kind]  # type: ignore[assignment]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        answer = super().step(copy.deepcopy(action))
        for part in action.values() if isinstance(action, dict) else [action]:
            if isinstance(part, np.ndarray):
                part[...] = 0  # it is the environment's own
        return answer


ACTIONS: dict[str, spaces.Space[Any]] = {
    "multi": spaces.MultiDiscrete([3, 2], start=[0, 5]),
    "grid": spaces.MultiDiscrete(np.array([[2, 2], [1, 3]])),
    "buttons": spaces.MultiBinary(4),
    "steps": spaces.Box(np.array([-1, 0]), np.array([1, 2]), dtype=np.int64),
    "pair": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(2))),
    "named": spaces.Dict({"turn": spaces.Discrete(3), "go": spaces.Dict({"left": spaces.MultiDiscrete([2, 2])})}),
    "panel": spaces.MultiDiscrete([5, 7, 3, 16], start=[0, 2, -1, 0]),
    "keys": spaces.MultiBinary((3, 4)),
    "robot": spaces.Dict(
        {
            "arm": spaces.Tuple((spaces.Discrete(40, start=5), spaces.MultiBinary(2))),
            "leg": spaces.Box(-3, 9, (2, 1), np.int16),
        }
    ),
    "floats": spaces.Dict(
        {"arm": spaces.Box(-2, 2, (2, 2), np.float64), "leg": spaces.Tuple((spaces.Box(0, 1, (), np.float32),))}
    ),
    "angle": spaces.Box(-3, 3, (), np.float32),
}


class Panel(gymnasium.Env[Any, Any]):
    """Shows which of twelve keys are to be pressed, and rewards each that is as it shall be; 20 steps an episode."""

    observation_space = spaces.Box(0.0, 1.0, (12,), np.float32)
    action_space = spaces.MultiBinary(12)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        right, self._step = float((action == self._wanted).mean()), self._step + 1
        return self._shown(), right, False, self._step == 20, {}

    def _shown(self) -> Any:
        self._wanted = self.np_random.integers(0, 2, 12)
        return self._wanted.astype(np.float32)


class Unbounded(Robot):
    """Takes actions of any size."""

    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Ordered(Robot):
    """Observes a Dict whose members have an order of their own."""

    observation_space = spaces.Dict(
        collections.OrderedDict(b=spaces.Discrete(2), a=spaces.Box(-1, 1, (2,), np.float64))
    )


class Mission(spaces.Space[str]):
    """Words, as MiniGrid has them: no space that Gymnasium can flatten."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "go to the door"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        return False


class Grid(Robot):
    """Observes an image, and words beside it."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (7, 7, 3), np.uint8), task=spaces.Tuple((spaces.Discrete(4), Mission((), str)))
    )


class Speechless(Robot):
    """Cannot be made, and does not say why."""

    def __init__(self) -> None:
        assert not isinstance(self, Robot)


class Broken(Robot):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no such device")


class Offset(Countdown):
    """Actions 5 and 6; an observation of bytes."""

    action_space = spaces.Discrete(2, start=5)
    observation_space = spaces.Box(0, 255, (2, 2), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((2, 2), np.uint8), super().reset(seed=seed)[1]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return np.full((2, 2), action, np.uint8), *super().step(action - 5)[1:]


if "Countdown-v0" not in gymnasium.registry:  # loaded again by tests that name this file
    gymnasium.register("Countdown-v0", Countdown)  # type: ignore[arg-type]  # its protocol demands **kwargs
    gymnasium.register("Grid-v0", Grid)  # type: ignore[arg-type]
