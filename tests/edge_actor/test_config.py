"""Settings: clashes are reported together, and nothing heavy is imported for --help."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from broker.contract import errors
from edge_actor import __main__ as command_line
from edge_actor import config
from edge_actor.acting import supervised_env
from edge_actor.environment import env
from tests.fakes.environments import toys


def test_all_clashes_are_reported_at_once() -> None:
    with pytest.raises(errors.ConfigError) as caught:
        config.ActorConfig(envs=0, rate_hz=-1.0, runtime="tensorrt", env_kwargs="{", safe_action="[1,")
    for word in (
        "envs must be above 0",
        "rate_hz must not",
        "'tensorrt'",
        "env_kwargs is not JSON",
        "safe_action is not",
    ):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_policy_age_s": 5.0, "rate_hz": 50.0}, "needs a safe_action"),
        ({"max_policy_age_s": 5.0, "safe_action": "0"}, "needs a rate_hz"),
        ({"one_env": True, "envs": 2}, "one_env"),
    ],
)
def test_clashes(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        config.ActorConfig(**settings)


@pytest.mark.parametrize(("text", "good"), [("1", True), ("2", False), ("[1, 2]", False), ('"left"', False)])
def test_the_safe_action_must_fit_the_environment(text: str, good: bool) -> None:
    settings = config.ActorConfig(safe_action=text, rate_hz=10.0)
    if good:
        assert supervised_env.SupervisedEnv(env.make("CartPole-v1"), settings).safe_action == 1
        return
    with pytest.raises(errors.ConfigError, match="safe_action"):
        supervised_env.SupervisedEnv(env.make("CartPole-v1"), settings)


def test_a_continuous_safe_action() -> None:
    settings = config.ActorConfig(safe_action="[0.5, 0]", rate_hz=10.0)
    made = supervised_env.SupervisedEnv(env.make(f"{toys.__file__}:Robot"), settings)
    assert made.safe_action.tolist() == [0.5, 0.0]


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    program = (
        "import sys; from edge_actor import __main__ as m\n"
        "try: m.main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'gymnasium', 'ai_edge_litert', 'paho'} & set(sys.modules)), file=sys.stderr)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert time.monotonic() - began < 1.0
    assert "--rate-hz" in done.stdout
    assert "gymnasium" not in done.stderr
    assert "ai_edge_litert" not in done.stderr


def test_an_actor_needs_a_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["run", "--env", "CartPole-v1"]) == errors.IdentityError.exit_code
    assert "actorq-broker enroll" in capsys.readouterr().err


def test_dump_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["run", "--env", "CartPole-v1", "--envs", "4", "--dump-config"]) == 0
    assert "envs = 4" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["run", "--enf", "x"], ["run", "--envs", "two", "--dump-config"]])
def test_misspelt_and_mistyped(arguments: list[str]) -> None:
    try:
        code = command_line.main(arguments)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    assert code in (errors.EXIT_USAGE, errors.ConfigError.exit_code)
