"""Environments: specs from spaces, actions on their way in, and errors that say what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from broker.contract import errors, specs
from edge_actor.environment import env
from tests.fakes.environments import toys

HERE = toys.__file__
FAKES = Path(HERE).parent


def test_cartpole() -> None:
    made = env.make("CartPole-v1")
    assert made.spec == specs.EnvSpec(specs.ObservationSpec((4,)), specs.ActionSpec("discrete", n=2))
    assert (made.n_envs, made.vectorized) == (1, False)


def test_the_spec_does_not_depend_on_the_number_of_copies() -> None:
    for name in ("CartPole-v1", "Acrobot-v1", f"{HERE}:Robot", f"{HERE}:Offset"):
        assert env.make(name).spec == env.make(name, 3).spec


def test_native_vector_entry_points_are_used_where_they_reset_on_the_next_step() -> None:
    native = env.make("CartPole-v1", 4)
    assert type(native.step.__self__).__name__ == "CartPoleVectorEnv"  # type: ignore[attr-defined]
    fallback = env.make("Acrobot-v1", 4)
    assert isinstance(fallback.step.__self__, SyncVectorEnv)  # type: ignore[attr-defined]


def test_dicts_are_flattened_in_the_order_of_their_keys() -> None:
    made = env.make(f"{HERE}:Robot")
    assert made.spec.observation == specs.ObservationSpec((4,))
    assert made.reset()[0].tolist() == [0.25, -0.5, 0.0, 1.0]  # a, then b as one-hot


def test_an_ordered_dict_keeps_its_order() -> None:
    assert env.make(f"{HERE}:Ordered").reset()[0].tolist() == [0.0, 1.0, 0.25, -0.5]  # b as one-hot, then a


def test_actions_without_bounds_are_refused_by_name() -> None:
    with pytest.raises(errors.SpecError, match="bounds must be finite") as caught:
        env.make(f"{HERE}:Unbounded")
    assert "TransformAction" in caught.value.todo


def test_deepmind_control_by_its_own_names() -> None:
    pytest.importorskip("dm_control")
    pytest.importorskip("shimmy")
    made = env.make("dm_control/cartpole-balance-v0")
    assert made.spec == specs.EnvSpec(
        specs.ObservationSpec((5,)), specs.ActionSpec("continuous", shape=(1,), low=(-1.0,), high=(1.0,))
    )
    first = made.reset(seed=3)[0]
    assert np.hypot(first[1], first[2]) == pytest.approx(1.0), "position: slider, cosine, sine; then velocity"
    assert made.reset(seed=3)[0].tolist() == first.tolist()
    assert made.step(made.to_env(np.array([5.0], np.float32)))[1] > 0.5
    assert env.make("dm_control/cartpole-balance-v0", 2).spec == made.spec
    made.close()


def test_mujoco_through_gymnasium() -> None:
    pytest.importorskip("mujoco")
    pytest.importorskip("imageio")
    made = env.make("Hopper-v5")
    assert made.spec.describe() == "obs float32[11] -> continuous[3]"
    env.check_from_network("Hopper-v5")


def test_continuous_actions_are_clipped_and_typed() -> None:
    made = env.make(f"{HERE}:Robot")
    assert made.spec.action == specs.ActionSpec("continuous", shape=(2,), low=(-1.0, 0.0), high=(2.0, 1.0))
    action = made.to_env(np.array([9.0, -9.0], np.float32))
    assert action.tolist() == [2.0, 0.0]
    assert action.dtype == np.float32


@pytest.mark.parametrize("n_envs", [1, 2])
def test_the_start_of_a_discrete_space_is_added(n_envs: int) -> None:
    made = env.make(f"{HERE}:Offset", n_envs)
    made.reset()
    chosen = np.array([1] * n_envs) if n_envs > 1 else 1
    assert np.all(made.to_env(chosen) == 6)
    made.step(made.to_env(chosen))


def test_bytes_stay_bytes() -> None:
    assert env.make(f"{HERE}:Offset").spec.observation == specs.ObservationSpec((2, 2), "uint8")


def test_module_and_file_and_arguments() -> None:
    for name in ("tests.fakes.environments.toys:Countdown-v0", f"{HERE}:Countdown", f"{HERE}:Countdown-v0"):
        made = env.make(name, 1, {"lengths": (1,)})
        made.reset()
        assert made.step(made.to_env(0))[2] is True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPol-v1", "did you mean CartPole-v1"),
        ("nonsense", "unknown environment 'nonsense'"),
        ("nowhere.at.all:Some-v0", "No module named 'nowhere'"),
        ("missing.py:Thing", "there is no such file"),
        (f"{HERE}:Nothing", "no class and no environment id 'Nothing'"),
        (f"{HERE}:HERE", "no class and no environment id 'HERE'"),
        (f"{HERE}:Broken", "OSError: no such device"),
        (f"{FAKES.parent / 'fake_learner.py'}:FakeLearner", "cannot be made: TypeError"),
    ],
)
def test_errors_say_what_is_wrong(name: str, message: str) -> None:
    with pytest.raises(errors.EnvironmentFailure) as caught:
        env.make(name)
    assert message in str(caught.value)
    assert caught.value.todo or caught.value.where


def test_wrong_arguments_are_an_error_of_the_environment() -> None:
    with pytest.raises(errors.EnvironmentFailure, match="unexpected keyword argument 'wind'"):
        env.make("CartPole-v1", 1, {"wind": 3})


@pytest.mark.parametrize(
    ("name", "space"),
    [
        ("Text", "observation space Text"),
        ("Arcade", "action space MultiBinary has 1025 parts of 2050 choices together, 1024 and 4096 at most"),
        ("Mixed", r"action space Dict with the part \['grip'\], a Box\(.*, is not carried beside"),
        ("Chatter", "action space Text is not carried"),
    ],
)
def test_spaces_that_cannot_be_carried_are_named(name: str, space: str) -> None:
    with pytest.raises(errors.SpecError, match=space):
        env.make(f"{HERE}:{name}")


@pytest.mark.fault(26)
@pytest.mark.parametrize("n_envs", [1, 2])
def test_a_member_that_cannot_be_carried_is_named_with_what_to_do(n_envs: int) -> None:
    with pytest.raises(errors.SpecError, match=r"member \['task'\]\[1\] is a Mission") as caught:
        env.make(f"{HERE}:Grid", n_envs)
    assert "FilterObservation" in caught.value.todo
    assert "--env FILE.py:make" in caught.value.todo
    assert caught.value.where == f"{HERE}:Grid"


@pytest.mark.fault(26)
def test_minigrid_s_own_wrapper_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toys.Mission, "__module__", "minigrid.core.mission")
    with pytest.raises(errors.SpecError) as caught:
        env.make("tests.fakes.environments.toys:Grid-v0")
    assert "minigrid.wrappers.ImgObsWrapper" in caught.value.todo


def test_the_wrapped_environment_of_a_file_is_taken_as_the_error_says(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import gymnasium\nfrom tests.fakes.environments import toys\n"
        "def make():\n    return gymnasium.wrappers.FilterObservation(toys.Grid(), ['image'])\n"
    )
    assert env.make(f"{file}:make").spec.observation.size == 7 * 7 * 3


@pytest.mark.fault(26)
def test_an_error_without_a_message_has_its_place() -> None:
    with pytest.raises(errors.EnvironmentFailure, match=r"AssertionError: no message, at .*toys\.py:\d+ in __init__"):
        env.make(f"{HERE}:Speechless")


def package(directory: Path, name: str, source: str) -> None:
    """Installs a package that needs Gymnasium, and must not be imported."""
    (directory / name).mkdir()
    (directory / name / "__init__.py").write_text("raise AssertionError('it was imported')")
    (directory / name / "ids.py").write_text(source)
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: gymnasium>=1.0\n"
    )
    (info / "RECORD").write_text(f"{name}/__init__.py,,\n{name}/ids.py,,\n")


@pytest.mark.fault(27)
def test_the_installed_package_that_registers_an_environment_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "crane_sim", "register(id='Crane-v3', entry_point='crane_sim.crane:Crane')")
    package(tmp_path, "highway_env", "")
    monkeypatch.syspath_prepend(tmp_path)
    for env_id, module in (("Crane-v3", "crane_sim"), ("highway-v0", "highway_env")):
        with pytest.raises(errors.EnvironmentFailure) as caught:
            env.make(env_id)
        assert f"--env {module}:{env_id}" in caught.value.todo
        assert "pip" not in caught.value.todo


@pytest.mark.fault(27)
def test_a_well_known_package_that_is_missing_is_named() -> None:
    with pytest.raises(errors.EnvironmentFailure) as caught:
        env.make("PyFlyt/QuadX-Hover-v4")
    assert "pip install PyFlyt" in caught.value.todo
    assert "--env PyFlyt.gym_envs:PyFlyt/QuadX-Hover-v4" in caught.value.todo


@pytest.mark.fault(32)
def test_a_file_may_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "winch_parts.py").write_text("LENGTHS = (2,)")
    (tmp_path / "nturl2path.py").write_text("raise AssertionError('the standard library comes first')")
    (tmp_path / "winch.py").write_text(
        "import nturl2path\nimport winch_parts\nfrom tests.fakes.environments import toys\n"
        "class Winch(toys.Countdown):\n"
        "    def __init__(self):\n        super().__init__(winch_parts.LENGTHS)\n"
    )
    monkeypatch.chdir(tmp_path.parent)
    made = env.make(f"{tmp_path.name}/winch.py:Winch")
    made.reset()
    assert [made.step(0)[2], made.step(0)[2]] == [False, True]


def test_a_file_runs_once_in_a_process_and_again_only_if_it_failed(tmp_path: Path) -> None:
    file = tmp_path / "hoist.py"
    file.write_text("1 / 0")
    with pytest.raises(errors.EnvironmentFailure, match="ZeroDivisionError"):
        env.make(f"{file}:Hoist")
    ran = tmp_path / "ran"
    file.write_text(
        "from tests.fakes.environments.toys import Countdown\n"
        f"with open({str(ran)!r}, 'a') as ran:\n    ran.write('x')\n"
        "def Hoist():\n    return Countdown((2,))\n"
    )
    for n_envs in (1, 3, 1):
        env.make(f"{file}:Hoist", n_envs)
    assert ran.read_text() == "x"


def test_two_files_of_one_name_are_two(tmp_path: Path) -> None:
    for size in (2, 3):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "crane.py").write_text(
            f"from tests.fakes.environments.toys import Countdown\ndef Crane():\n    return Countdown(({size},))\n"
        )
    for size in (2, 3, 2):
        made = env.make(f"{tmp_path / str(size) / 'crane.py'}:Crane")
        made.reset()
        assert [made.step(0)[2] for _ in range(size)] == [*[False] * (size - 1), True]


@pytest.mark.fault(32)
def test_a_neighbour_that_is_missing_is_looked_for_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "lift.py").write_text("import lift_parts_that_are_nowhere")
    with pytest.raises(errors.EnvironmentFailure, match="lift_parts_that_are_nowhere") as caught:
        env.make(f"{tmp_path / 'lift.py'}:Lift")
    assert str(tmp_path) in caught.value.todo


def test_the_network_may_name_gymnasium_s_own_environments_only() -> None:
    env.check_from_network("CartPole-v1")
    env.check_from_network("Acrobot-v1")
    for name in (
        "Countdown-v0",
        "os:CartPole-v1",
        "evil.py:Thing",
        "CartPole",
        "",
        "tests.fakes.environments.toys:Countdown-v0",
    ):
        with pytest.raises(errors.EnvironmentFailure, match="not one of Gymnasium's own"):
            env.check_from_network(name)
