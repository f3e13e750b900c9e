"""Every setting of an actor, with its meaning: flags, environment variables and files all come from here.

Precedence, weakest first: the defaults below, --config FILE, ACTORQ_ACTOR_* environment variables, flags.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from broker.contract import errors, messages
from broker.program.settings import setting

ENV_PREFIX = "ACTORQ_ACTOR_"
RUNTIMES = ("auto", "ai-edge-litert", "tflite-runtime")
RUNTIME_HELP = f"TFLite runtime: {', '.join(RUNTIMES)}; or MODULE:CLASS, one of your own"


def is_runtime(name: str) -> bool:
    """Returns whether a text is a known runtime, or the name of a class: MODULE:CLASS."""
    module, colon, leaf = name.partition(":")
    return name in RUNTIMES or (
        bool(colon) and leaf.isidentifier() and all(part.isidentifier() for part in module.split("."))
    )


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """Settings of `actorq-actor run`.

    Raises:
        ConfigError: Values that cannot be meant, all of them in one message.
    """

    bundle: str = setting(
        "", "enrolment bundle of this actor, made by `actorq-broker enroll` (default: ~/.actorq/bundle.json)"
    )
    fleet: str = setting("", "name of the fleet, if it must be checked against the bundle's")
    broker: tuple[str, ...] = setting((), "HOST[:PORT] of the brokers to try in turn, instead of the bundle's")
    env: str = setting(
        "",
        "Gymnasium id, module:EnvId, or FILE.py:ClassOrEnvId; without one the learner's task, if it is Gymnasium's own",
    )
    env_kwargs: str = setting("{}", "JSON object of arguments for the environment")
    frame_stack: int = setting(1, "observations that the policy sees at once, the newest ones; each is sent once")
    envs: int = setting(1, "copies of the environment, stepped together with one batched inference")
    one_env: bool = setting(
        False, "the environment exists once, like a robot: evaluations use it too, and end the episode in progress"
    )
    rate_hz: float = setting(0.0, "control rate to hold; 0 acts as fast as it can")
    safe_action: str = setting("", "JSON action for stops, failures and policies that are too old; empty: none")
    max_policy_age_s: float = setting(
        0.0, "take the safe action when for so long no newer policy came, nor word that there is none; 0: never"
    )
    state_dir: str = setting("", "where boot counter and last good policy are kept (default: ~/.actorq/NAME)")
    heartbeat_s: float = setting(1.0, "time between two states")
    spool_bytes: int = setting(64_000_000, "experience kept until the learner has it; beyond, the oldest is dropped")
    spool_dir: str = setting(
        "",
        "where it is kept; empty: in memory (/dev/shm), where it outlives this process; disk: in the state directory",
    )
    connect_timeout_s: float = setting(
        10.0, "how long to look for a broker, or for the learner's task, at the start; as a service it looks for ever"
    )
    threads: int = setting(1, "threads of the TFLite runtime; one is the fastest for small policies")
    seed: int = setting(0, "of the environments, and of all that is random before the learner assigns a seed")
    runtime: str = setting("auto", RUNTIME_HELP)
    allow: tuple[str, ...] = setting(
        ("pause", "resume", "logs", "set"),
        f"what the fleet may order this actor (`actorq-learner fleet`), of {', '.join(messages.ORDER_KINDS)}",
    )
    allow_env_kwargs: tuple[str, ...] = setting((), "names of arguments of the environment that `set` may change")
    trial_s: float = setting(
        60.0, "time within which an actor must be back with settings that `set` changed, or they go"
    )
    reboot_command: str = setting("systemctl reboot", "what the order `reboot` runs, where it is allowed")
    update_reserve_bytes: int = setting(100_000_000, "what the order `update` must leave free on the disk")
    verbose: bool = setting(False, "show tracebacks")

    def __post_init__(self) -> None:
        problems = []
        for name in ("envs", "frame_stack", "threads", "heartbeat_s", "spool_bytes", "connect_timeout_s", "trial_s"):
            if getattr(self, name) <= 0:
                problems.append(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("rate_hz", "max_policy_age_s", "seed", "update_reserve_bytes"):
            if getattr(self, name) < 0:
                problems.append(f"{name} must not be negative: {getattr(self, name)}")
        if not is_runtime(self.runtime):
            problems.append(f"runtime {self.runtime!r} is none of {', '.join(RUNTIMES)}, and no MODULE:CLASS")
        if self.envs > messages.MAX_ENVS:
            problems.append(f"envs must be at most {messages.MAX_ENVS}, not {self.envs}")
        if len(self.env) > messages.MAX_NAME_CHARS:
            problems.append(f"env must have at most {messages.MAX_NAME_CHARS} characters, not {len(self.env)}")
        if self.one_env and self.envs != 1:
            problems.append(f"one_env says that there is one environment, envs = {self.envs} that there are more")
        if wrong := [kind for kind in self.allow if kind not in messages.ORDER_KINDS]:
            problems.append(f"allow has {', '.join(wrong)}, which is none of {', '.join(messages.ORDER_KINDS)}")
        if self.max_policy_age_s and not self.safe_action:
            problems.append("max_policy_age_s needs a safe_action to take")
        if self.max_policy_age_s and not self.rate_hz:
            problems.append("max_policy_age_s needs a rate_hz: an actor without a control rate waits for its learner")
        for name, kind in (("env_kwargs", dict), ("safe_action", object)):
            try:
                if not isinstance(json.loads(getattr(self, name) or "0"), kind):
                    problems.append(f"{name} must be a JSON object, not {getattr(self, name)!r}")
            except ValueError as error:
                problems.append(f"{name} is not JSON: {error}")
        if problems:
            raise errors.ConfigError("\n  ".join(problems), todo="actorq-actor run --help explains every setting")

    @property
    def env_arguments(self) -> dict[str, Any]:
        """`env_kwargs`, parsed."""
        arguments: dict[str, Any] = json.loads(self.env_kwargs)
        return arguments
