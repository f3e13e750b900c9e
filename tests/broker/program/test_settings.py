"""Settings: who wins, what is refused, and that a dump reads back."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from broker.contract import errors
from broker.program import settings


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    rate_hz: float = settings.setting(0.0, "control rate")
    steps: int = settings.setting(1000, "how many, 100% of them")
    name: str = settings.setting("main", "a name")
    fast: bool = settings.setting(False, "hurry")
    brokers: tuple[str, ...] = settings.setting(("127.0.0.1",), "addresses")
    layers: tuple[int, ...] = settings.setting((64, 64), "widths")


@dataclasses.dataclass(frozen=True, slots=True)
class Other:
    steps: int = settings.setting(1000, "shared with Config")
    depth: int = settings.setting(1, "its own")


def load(*argv: str, tables: tuple[settings.Table, ...] = ()) -> Config:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser, Config)
    return settings.load(Config, parser.parse_args(list(argv)), tables=tables, env_prefix="AQTEST_")


def test_defaults() -> None:
    assert load() == Config()


def test_the_stronger_place_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text('name = "file"\nsteps = 2\nlayers = [1, 2]\nrate_hz = 50\n')
    monkeypatch.setenv("AQTEST_STEPS", "3")
    monkeypatch.setenv("AQTEST_RATE_HZ", "4")
    table = ("tasks.toml", {"name": "table", "fast": True, "steps": 1})
    got = load("--config", str(file), "--rate-hz", "5", tables=(table,))
    assert got == Config(rate_hz=5.0, steps=3, name="file", fast=True, layers=(1, 2))


def test_flags_of_every_type() -> None:
    got = load(
        "--rate-hz", "1e2", "--steps", "7", "--name", "", "--no-fast", "--brokers", "a:1, b", "--layers", "256,256",
    )  # fmt: skip
    assert got == Config(100.0, 7, "", False, ("a:1", "b"), (256, 256))


def test_a_list_may_be_given_item_by_item() -> None:
    assert load("--brokers", "a:1", "--brokers", "b, c").brokers == ("a:1", "b", "c")


@pytest.mark.parametrize("text", ["true", "1", "YES", "on"])
def test_truth_in_the_environment(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQTEST_FAST", text)
    assert load().fast is True


def test_every_problem_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text('stepz = 2\nlayers = "64"\nfast = 1\n')
    monkeypatch.setenv("AQTEST_RATE_HZ", "quick")
    monkeypatch.setenv("AQTEST_NONSENSE", "1")
    with pytest.raises(errors.ConfigError) as caught:
        load("--config", str(file), "--steps", "1.5")
    text = str(caught.value)
    for part in (
        "6 wrong settings",
        f"{file}: unknown key 'stepz'; did you mean 'steps'?",
        f"{file}: layers must be a list",
        f"{file}: fast must be a truth value, not 1",
        "environment AQTEST_*: rate_hz must be a number, not 'quick'",
        "environment AQTEST_*: unknown key 'nonsense'",
        "flag: steps must be a whole number, not '1.5'",
        "to do:",
    ):
        assert part in text


@pytest.mark.parametrize(
    "line", ["rate_hz = true", "steps = 1.0", "name = 3", "brokers = [1]", "layers = [1.5]", "fast = 'yes'"]
)
def test_wrong_types_in_a_file(tmp_path: Path, line: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(line + "\n")
    with pytest.raises(errors.ConfigError, match=line.split(" ", 1)[0]):
        load("--config", str(file))


@pytest.mark.parametrize("text", [None, "= 1", "\x00"])
def test_files_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "c.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        load("--config", str(file))


def test_a_dump_reads_back(tmp_path: Path) -> None:
    config = Config(12.5, 3, 'quo"te\\ü', True, ("a", "b:1"), (1, 2))
    file = tmp_path / "c.toml"
    file.write_text(settings.dump(config))
    assert load("--config", str(file)) == config


def test_dump_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings.dump_if_asked(argparse.Namespace(dump_config=True), Config(), Other())
    assert "steps = 1000" in capsys.readouterr().out
    assert not settings.dump_if_asked(argparse.Namespace(dump_config=False), Config())
    assert capsys.readouterr().out == ""


def test_two_classes_share_a_flag() -> None:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser, Config, Other)
    values = settings.resolve(
        (Config, Other), parser.parse_args(["--steps", "5", "--depth", "2"]), env_prefix="AQTEST_"
    )
    assert settings.build(Config, values).steps == settings.build(Other, values).steps == 5
    assert settings.build(Other, values).depth == 2


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(Config):
        assert "--" + field.name.replace("_", "-") in text
    assert "100% of them" in text
