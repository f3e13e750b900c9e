"""Evaluation: seeded, repeatable, the same by command line and by the learner's command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, errors, messages, specs
from edge_actor import __main__ as command_line
from edge_actor.acting import evaluate
from edge_actor.environment import env
from edge_actor.fleet import command
from edge_actor.policies import policy
from tests.edge_actor.policies.models import files
from tests.fakes import fake_learner
from tests.fakes.environments import toys

CARTPOLE = env.make("CartPole-v1")
MODEL = files.INT8.read_bytes()


def acting() -> policy.Policy:
    return policy.Policy(MODEL, "q_values", CARTPOLE.spec, 1)


def build(manifest: messages.Manifest, model: bytes) -> policy.Policy:
    return policy.from_manifest(manifest, model, spec=CARTPOLE.spec, batch=1, runtime="auto", threads=1)


def order(**changes: Any) -> messages.Command:
    fields: dict[str, Any] = {
        "command_id": "c1",
        "kind": "evaluate",
        "boot": 3,
        "episodes": 3,
        "seed": 5,
        "manifest": fake_learner.manifest(MODEL, CARTPOLE.spec.fingerprint),
        "model": np.frombuffer(MODEL, np.uint8),
    }
    return messages.Command(**(fields | changes))


def test_it_is_seeded_and_repeats() -> None:
    first, again = (evaluate.run(acting(), CARTPOLE, 5, 0) for _ in range(2))
    assert first is not None
    assert again is not None
    assert first.episode_return.tolist() == again.episode_return.tolist()
    assert first.steps == again.steps == sum(first.episode_return)
    shifted = evaluate.run(acting(), CARTPOLE, 4, 1)
    assert shifted is not None
    assert shifted.episode_return.tolist() == first.episode_return[1:].tolist()


def test_how_far_it_is_is_said_at_times(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate.run_at_random(CARTPOLE, 2, 0)
    assert not caplog.messages  # it took no time
    monkeypatch.setattr(evaluate, "_TOLD_S", 0.0)
    with caplog.at_level("INFO", "edge_actor"):
        returns = evaluate.run_at_random(CARTPOLE, 2, 0).episode_return
    assert caplog.messages == [
        f"played 1 of 2 episodes: return {returns[0]:.5g} on average",
        f"played 2 of 2 episodes: return {returns.mean():.5g} on average",
    ]


def test_times_are_in_order() -> None:
    score = evaluate.run(acting(), CARTPOLE, 1, 0)
    assert score is not None
    t = score.timing
    assert 0 < t["invoke_us_p50"] <= t["invoke_us_p99"]
    assert t["invoke_us_p50"] < t["observation_to_action_us_p50"] <= t["observation_to_action_us_p99"]


def test_it_can_be_stopped() -> None:
    assert evaluate.run(acting(), CARTPOLE, 5, 0, lambda: True) is None


@pytest.mark.fault(2)
@pytest.mark.parametrize("policy_name", ["random", str(files.INT8)])
@pytest.mark.parametrize("limit", [["--max-steps", "40"], ["--max-s", "0.1"]])
def test_the_command_line_gives_up_episodes_that_never_end(
    policy_name: str, limit: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", policy_name, "--env", f"{toys.__file__}:Endless", *limit]
    assert command_line.main(arguments) == errors.EnvironmentFailure.exit_code
    assert "in episode 1 of 20" in capsys.readouterr().err


def test_chance_is_seeded_and_draws_every_choice_alike() -> None:
    first, again, other = (evaluate.run_at_random(CARTPOLE, 5, seed) for seed in (0, 0, 1))
    assert first.episode_return.tolist() == again.episode_return.tolist() != other.episode_return.tolist()
    assert 10 < first.episode_return.mean() < 50  # 22 is CartPole's well-known mean
    act = evaluate._at_random(specs.ActionSpec("discrete", n=3), 0)
    counts = np.bincount([act(np.zeros((1, 4))) for _ in range(3000)], minlength=3)
    assert counts.tolist() == pytest.approx([1000, 1000, 1000], abs=120)  # about 4.6 deviations


def test_chance_stays_within_bounds_and_reaches_for_them() -> None:
    act = evaluate._at_random(specs.ActionSpec("continuous", shape=(2,), low=(-1.0, 5.0), high=(3.0, 7.0)), 0)
    actions = np.array([act(np.zeros((1, 4))) for _ in range(2000)])
    assert actions.shape == (2000, 2)
    assert actions.min(0) == pytest.approx([-1, 5], abs=0.02)
    assert actions.max(0) == pytest.approx([3, 7], abs=0.02)
    assert (actions.min(0) >= [-1, 5]).all() and (actions.max(0) <= [3, 7]).all()


def test_the_learner_s_command_is_answered_once() -> None:
    commander = command.Commander(3)
    report = commander.answer(order(), build, lambda: env.make("CartPole-v1"), lambda: False)
    assert report is not None
    direct = evaluate.run(acting(), CARTPOLE, 3, 5)
    assert direct is not None
    assert report.error == ""
    assert report.episode_return.tolist() == direct.episode_return.tolist()
    assert report.values["return_mean"] == direct.values["return_mean"]
    assert {"invoke_us_p50", "invoke_us_p99", "observation_to_action_us_p50", "observation_to_action_us_p99"} <= set(
        report.values
    )
    assert set(report.labels) == {"runtime", "delegate", "sha256"}
    assert commander.answer(order(), build, lambda: CARTPOLE, lambda: False) is None
    assert commander.answer(order(command_id="c2", boot=2), build, lambda: CARTPOLE, lambda: False) is None
    commander.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"manifest": None}, "needs a policy"),
        ({"episodes": 0}, "1 to 1000 episodes"),
        ({"model": np.zeros(9, np.uint8)}, "manifest says"),
        ({"manifest": fake_learner.manifest(MODEL, "0" * 16)}, "is for spec"),
        ({"kind": "dance"}, "cannot 'dance'"),
    ],
)
def test_commands_that_cannot_be_done_are_answered_too(changes: dict[str, Any], message: str) -> None:
    report = command.Commander(3).answer(order(**changes), build, lambda: CARTPOLE, lambda: False)
    assert report is not None
    assert message in report.error


def test_a_broken_environment_is_reported() -> None:
    toys.Flaky.taken = 0
    flaky = env.make("tests.fakes.environments.toys:Countdown-v0")
    report = command.Commander(3).evaluate(order(), build, flaky, lambda: False)
    assert report is not None
    assert "is for spec" in report.error


@pytest.mark.fault(7)
@pytest.mark.parametrize("odd", [float("nan"), 1e39, None, "leaves"])
def test_an_odd_reward_is_reported_and_the_next_evaluation_begins_with_another_environment(odd: Any) -> None:
    def step(action: Any) -> Any:
        if odd == "leaves":
            raise SystemExit(4)
        return CARTPOLE.step(action)[0], odd, False, False, {}

    closed: list[str] = []
    broken = dataclasses.replace(CARTPOLE, step=step, close=lambda: closed.append("broken"))
    made = iter([broken, CARTPOLE])
    commander = command.Commander(3)
    report = commander.answer(order(), build, lambda: next(made), lambda: False)
    assert report is not None
    assert report.error
    codec.encode(report)  # it can be sent
    report = commander.answer(order(command_id="c2"), build, lambda: next(made), lambda: False)
    assert report is not None
    assert report.error == ""
    assert closed == ["broken"]


def test_the_command_line_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", str(files.INT8), "--env", "CartPole-v1", "--episodes", "3", "--seed", "5"]
    assert command_line.main([*arguments, "--json"]) == errors.EXIT_OK
    result = json.loads(capsys.readouterr().out)
    direct = evaluate.run(acting(), CARTPOLE, 3, 5)
    assert direct is not None
    assert result["episode_return"] == direct.episode_return.tolist()
    assert result["delegate"] in ("XNNPACK", "built-in")
    assert command_line.main(arguments) == errors.EXIT_OK
    assert "return_mean" in capsys.readouterr().out


def test_the_command_line_scores_chance(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "random", "--env", "CartPole-v1", "--episodes", "3", "--seed", "5", "--json"]
    assert command_line.main(arguments) == errors.EXIT_OK
    result = json.loads(capsys.readouterr().out)
    assert result["episode_return"] == evaluate.run_at_random(CARTPOLE, 3, 5).episode_return.tolist()
    assert result["return_mean"] == pytest.approx(np.mean(result["episode_return"]))
    assert "runtime" not in result  # nothing ran on one


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.tflite", "--env", "CartPole-v1"], 16, "the policy cannot be read"),
        ([str(files.INT8), "--env", "CartPole-v9"], 11, "CartPole-v1"),
        ([str(files.INT8), "--env", "Acrobot-v1"], 16, "trained for this environment"),
        ([str(files.INT8), "--env", "Pendulum-v1"], 16, "needs (3,) to 1"),
        ([str(files.INT8), "--env", "CartPole-v1", "--head", "gaussian"], 12, "gaussian"),
        ([str(files.INT8), "--env", "CartPole-v1", "--env-kwargs", "[]"], 10, "env_kwargs must be a JSON object"),
        ([str(files.INT8), "--env", "CartPole-v1", "--episodes", "0"], 10, "at least 1"),
    ],
)
def test_bad_input(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["evaluate", *arguments]) == code
    assert message in capsys.readouterr().err


def test_junk_is_no_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "junk.tflite").write_bytes(b"\1" * 500)
    assert command_line.main(["evaluate", str(tmp_path / "junk.tflite"), "--env", "CartPole-v1"]) == 16
    assert "not a TFLite model" in capsys.readouterr().err


def test_what_it_saw_is_kept_with_the_number_of_the_episode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "seen.npz"
    arguments = ["evaluate", str(files.INT8), "--env", "CartPole-v1", "--episodes", "3", "--json"]
    assert command_line.main([*arguments, "--observations", str(file)]) == errors.EXIT_OK
    said = json.loads(capsys.readouterr().out)
    seen = np.load(file)
    assert seen["observations"].shape == (said["steps"], 4)
    assert np.bincount(seen["episode"]).tolist() == said["episode_return"]


def test_of_too_many_observations_every_nth_is_kept(tmp_path: Path) -> None:
    kept = evaluate.Kept(100 * 4)
    for k in range(1000):
        kept.add(np.full((1, 1), k, np.float32), k // 10)
    kept.write(tmp_path / "seen.npz")
    seen = np.load(tmp_path / "seen.npz")
    values = seen["observations"][:, 0]
    assert 25 < len(values) <= 101
    assert (np.diff(values) == np.diff(values)[0]).all()
    np.testing.assert_array_equal(seen["episode"], values // 10)
