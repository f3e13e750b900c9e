"""Devices that are not there, or cannot be used so, are refused; and in a process of their own, two that can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.contract import errors
from learner import __main__ as program
from learner import config
from learner.run import devices


@pytest.mark.parametrize(
    ("named", "algorithm", "why"),
    [
        (("TPU:0",), config.DqnConfig(), "'TPU:0' is none: they are named as CPU:0 or GPU:0"),
        (("gpu",), config.DqnConfig(), "'gpu' is none"),
        (("CPU:0", "CPU:0"), config.DqnConfig(), "CPU:0,CPU:0 names one twice"),
        (("CPU:0", "GPU:0"), config.DqnConfig(), "CPU:0,GPU:0 are not alike"),
        (("CPU:0", "CPU:1"), config.PpoConfig(), "ppo and a2c learn on one"),
        (("CPU:0", "CPU:1"), config.A2cConfig(), "ppo and a2c learn on one"),
    ],
)
def test_devices_that_cannot_be_used_so_are_refused(
    named: tuple[str, ...], algorithm: config.AlgorithmConfig, why: str
) -> None:
    with pytest.raises(errors.ConfigError, match=why):
        config.check(config.Settings(config.TrainConfig(learner_devices=named), algorithm, config.GateConfig()))


def test_more_devices_than_there_are_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="there is no CPU:998 and no CPU:999 on this machine") as caught:
        devices.prepare(("CPU:0", "CPU:998", "CPU:999"))
    assert f"CPU:0 to CPU:{(os.cpu_count() or 1) - 1}" in caught.value.todo


def test_a_gpu_that_is_not_there_is_told_before_anybody_waits_for_actors(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--learner-devices", "GPU:999", "--wait-s", "0", "--no-energy"]
    assert program.main(arguments) == errors.ConfigError.exit_code
    said = capfd.readouterr().err
    assert said.count("error: ") == 1
    assert "there is no GPU:999 on this machine" in said
    assert "where: learner_devices" in said


def test_a_clash_ends_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--algorithm", "ppo", "--learner-devices", "CPU:0,CPU:1"]
    assert program.main(arguments) == errors.ConfigError.exit_code
    said = capfd.readouterr().err
    assert said.count("error: ") == 1
    assert "ppo and a2c learn on one" in said


def test_on_two_devices_of_the_cpu() -> None:
    """The CPU is divided before TensorFlow's first operation: of this process it may be over."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("there is one core")
    tests = Path(__file__).with_name("two_devices.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
