"""The page of a report: whole runs, broken ones, comparisons, and names that want to be more than text."""

from __future__ import annotations

import argparse
import dataclasses
import html.parser
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib import figure

from broker.contract import errors
from learner import __main__ as command_line
from learner.commands import report as report_command
from learner.study import report
from learner.study.compare import arguments, directory, plan
from learner.study.report import breakdown, costs, curves, reading, svg
from tests.fakes import log_reader

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>${x}$\\frac{1}\u202e\x00\n{{7*7}}"


def make_run(path: Path, *, seed: int = 0, task: str = "CartPole-v1", **changes: Any) -> Path:
    """A run as a learner leaves it, of 40 rows."""
    path.mkdir(parents=True)
    precision = changes.get("precision", "int8")
    settings = {"env": task, "algorithm": "dqn", "seed": seed, "precision": precision, "solved_return": 475.0}
    (path / "config.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    rows = [
        {"wall_s": k, "env_steps": 100 * k, "updates": k, "return_mean": 10.0 * k + seed, "publish_to_acting_ms": 5 + k}
        | ({"published_return_mean": 12.0 * k} if k % 5 == 0 else {})
        for k in range(40)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary: dict[str, Any] = {
        "env_id": task,
        "seed": seed,
        "precision": precision,
        "solved": True,
        "env_steps": 4000,
        "learner_wall_s": 40.0,
        f"{precision}_return_mean": 480.0,
        "fp32_return_mean": 481.0,
        f"policy_{precision}_bytes": 11448,
        "policy_fp32_bytes": 20272,
        "bytes_per_policy": 2100,
        "invoke_us_p50": 1.0,
        "observation_to_action_us_p50": 2.0,
        "runtime": "ai-edge-litert 2.3.0",
        "delegate": "XNNPACK",
        "breakdown": {
            "learner": {"update": {"count": 9, "total_s": 3.0}, "wait": {"count": 9, "total_s": 1.0}},
            "actors": {"environment": {"count": 9, "total_s": 2.0}, "send": {"count": 9, "total_s": 1.0}},
            "actorq": {"step": 2.0, "pull": 1.0, "deserialise": 0.5, "load": 0.5},
        },
        "energy": {
            "learner": {"joules": 300.0, "modelled": True, "source": "codecarbon"},
            "actors": {"joules": 90.0, "modelled": False, "source": "INA226", "coverage": 0.9},
            "kwh": 1e-4,
            "kgco2e": 4e-5,
            "joules_per_million_steps": 97500.0,
            "carbon_g_per_kwh": 369.0,
            "carbon_source": "codecarbon, USA",
            "note": "learner 300 J modelled + actors 90 J measured",
        },
    }
    (path / "summary.json").write_text(json.dumps(summary))
    actor = {"actor_id": "pi", "board": "a board", "runtime": "r", "delegate": "XNNPACK", "n_envs": 4, "steps": 4000}
    details = {"fleet": [actor], "publish_to_acting_ms": list(range(101)), "policy_lag_steps": {"0": 300, "3": 100}}
    (path / "details.json").write_text(json.dumps(details))
    start = {"time": "2026-11-24", "command": ["learner", "train", "--seed", str(seed)], "versions": {"numpy": "2"}}
    (path / "run.json").write_text(json.dumps({"starts": [start]}))
    return path


def make_comparison(path: Path) -> Path:
    rows = [
        {
            "benchmark": "compare",
            "case": f"{regime}, CartPole-v1 256x256, {who} over float32: environment steps/s at equal learner work",
            "value": 2.0,
            "reference": 1.0,
            "unit": "1/s",
            "ratio": ratio,
            "difference": None,
            "interval": [ratio - 0.1, ratio + 0.2],
            "runs": 5,
            "spread": 0.1,
            "explain": "learner idle 40 %",
            "regime": regime,
            "hidden": [256, 256],
            "precision": who,
            "peer": "",
            "over": "float32",
        }
        for regime, who, ratio in (
            ("actor-bound", "int8", 3.1),
            ("actor-bound", "float16", 1.2),
            ("learner-bound", "int8", 1.0),
        )
    ]
    lines = []
    for precision in ("int8", "float32"):
        name = f"threshold-{precision}"
        made = make_run(path / "runs" / name, precision=precision)
        arm = {"regime": "actor-bound", "hidden": [256, 256], "precision": precision, "peer": ""}
        summary = json.loads((made / "summary.json").read_text())
        lines.append(
            {"run": name, "directory": f"runs/{name}", "arm": arm, "kind": "threshold", "seed": 0, "summary": summary}
        )
    lines.append({"run": "bad", "directory": "../..", "arm": {}, "summary": {}, "failed": "no broker"})
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    request = plan.Request(precisions=("int8", "float32"), hidden=((256, 256), (8,)), settings=("a=1", "b=2"), actors=9)
    (path / "plan.json").write_text(json.dumps(dataclasses.asdict(request)))
    return path


class Page(html.parser.HTMLParser):
    """A page as a browser would find it: elements by name, and the text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.source = file.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


def test_seeds_of_one_setting_are_drawn_together(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"seed-{seed}", seed=seed) for seed in range(3)]
    page = Page(report.write(runs, tmp_path / "page.html"))
    assert "CartPole-v1: 3 runs" in page.text and "3 runs, seeds 0, 1, 2" in page.text
    assert "all runs: median 391 (390 to 392) after 3,900 steps" in page.text
    assert "all runs: median 480 (480 to 480) after 4,000 steps" in page.text, "the last score is in the summary alone"


def test_a_run_without_metrics_leaves_the_curves_to_the_others(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"seed-{seed}", seed=seed) for seed in range(3)]
    (runs[0] / "metrics.jsonl").unlink()
    found = reading.read(runs)
    curve = curves._curve(found.runs, "published_return_mean", "env_steps")
    assert curve is not None and len(curve.thin) == 2
    assert (curve.at[0], curve.at[-1]) == (0.0, 4000.0)


def test_sessions_of_a_resumed_run_follow_each_other_and_costs_are_of_the_last(tmp_path: Path) -> None:
    resumed, whole = make_run(tmp_path / "resumed"), make_run(tmp_path / "whole", seed=1)
    with open(resumed / "metrics.jsonl", "a") as file:
        for k in range(10):
            row = {"wall_s": k, "env_steps": 4000 + 100 * k, "return_mean": 400.0, "published_return_mean": 470.0}
            file.write(json.dumps(row) + "\n")
    summary = json.loads((resumed / "summary.json").read_text())
    summary |= {"learner_wall_s": 10.0, "env_steps": 5000, "session_env_steps": 1000, "bytes_received": 7000}
    (resumed / "summary.json").write_text(json.dumps(summary))
    found = reading.read([resumed, whole])
    seconds = [at for at, _ in found.runs[0].series("return_mean", "wall_s")]
    assert seconds == sorted(seconds) and seconds[-1] == 39 + 9
    assert [run.wall_s for run in found.runs] == [49.0, 40.0]
    assert curves._points(found.runs[0], "published_return_mean", "wall_s")[-1] == (49.0, 480.0)
    assert [run.session_steps for run in found.runs] == [1000.0, 4000.0]
    assert costs._per_million(found.runs[:1])["learner"][0] == 1e6 * 300.0 / 1000
    assert costs._received_per_step(found.runs[0]) == 7.0
    assert breakdown._actorq_seconds(found.runs[:1])["step"] == 1000 * 2.0 / 1000


def test_settings_that_differ_are_told_apart_and_come_first(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / precision, precision=precision) for precision in ("int8", "float32")]
    page = Page(report.write(runs, tmp_path / "page.html"))
    assert "precision int8" in page.text and "precision float32" in page.text
    assert page.text.index("What differs between the runs") < page.text.index("What is the same in all of them")
    assert "What their ratios are worth: the learner's joules are modelled" in page.text


def test_every_picture_has_a_title_and_its_figures_in_words(tmp_path: Path) -> None:
    page = Page(report.write([make_run(tmp_path / "run"), make_comparison(tmp_path / "c")], tmp_path / "page.html"))
    pictures = page.named("svg")
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(pictures) >= 20 and len(set(ids)) == len(ids)
    for picture in pictures:
        assert picture["role"] == "img"
        assert {picture["aria-labelledby"], picture["aria-describedby"]} <= set(ids)
    captions = re.findall(r"<figcaption[^>]*>(.*?)</figcaption>", page.source)
    assert len(captions) == len(pictures) and all(re.search(r"\d", caption) for caption in captions)


def test_no_label_is_wider_than_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, finish, seen = make_run(tmp_path / "run"), svg.finish, []
    row = {"recipe": "only equalised channels", "return_difference": -1.0, "return_low": -30.0, "return_high": 1.0}
    (run / "fidelity.json").write_text(json.dumps({"rows": [row]}))

    def checked(made: figure.Figure, title: str, *rest: str) -> svg.Picture:
        made.draw_without_rendering()  # lays it out
        box = made.axes[0].xaxis.label.get_window_extent()
        seen.append(title)
        assert box.x0 >= 0 and box.x1 <= made.bbox.width, title
        return finish(made, title, *rest)

    monkeypatch.setattr(svg, "finish", checked)
    report.write([run, make_comparison(tmp_path / "c")], tmp_path / "page.html")
    assert any("Fidelity" in title for title in seen) and len(seen) >= 20


def test_it_needs_no_network_and_has_the_colours_of_both_schemes(tmp_path: Path) -> None:
    page = Page(report.write([make_run(tmp_path / "run")], tmp_path / "page.html"))
    assert not {name for name, _ in page.elements} & {"script", "link", "img", "iframe", "object", "image"}
    assert "default-src 'none'" in page.source and "prefers-color-scheme:dark" in page.source
    links = [attrs.get("href") or attrs.get("xlink:href") or "#" for _, attrs in page.elements]
    assert all(link.startswith("#") for link in links)
    assert "var(--s0)" in page.source and "#0000f" not in page.source, "a stand-in for a colour is left"
    assert "<text" in page.source, "text stays text"


def test_a_comparison_has_its_ratios_with_intervals_and_its_runs(tmp_path: Path) -> None:
    page = Page(report.write([make_comparison(tmp_path / "c")], tmp_path / "page.html"))
    assert "Ratio of environment steps/s at equal learner work, actor-bound" in page.text
    assert "256x256, int8 over float32: 3.1 (3 to 3.3)" in page.text
    assert "256x256, int8 over float32: 1 (0.9 to 1.2: no difference is shown)" in page.text
    assert "CartPole-v1, actor-bound, threshold, 256x256" in page.text
    assert "run bad failed, and is left out: no broker" in page.text


def test_a_comparison_is_made_again_by_one_command(tmp_path: Path) -> None:
    page = Page(report.write([make_comparison(tmp_path / "c")], tmp_path / "page.html"))
    (command,) = [line for line in page.text.splitlines() if "actorq-learner compare " in line]
    words = shlex.split(command[command.index("actorq-learner compare") :])
    parser = argparse.ArgumentParser()
    arguments.add(parser)
    given = arguments.given(parser.parse_args(words[2:]))
    assert words[-2:] == ["-o", f"{tmp_path / 'c'}-again"]
    assert plan.Request(**given) == directory._request(json.loads((tmp_path / "c" / "plan.json").read_text()))


def test_titles_are_whole_and_runs_without_a_goal_are_not_unsolved(tmp_path: Path) -> None:
    made = make_comparison(tmp_path / "c")
    for run in (made / "runs").iterdir():
        settings = (run / "config.toml").read_text().replace("475.0", "inf")
        (run / "config.toml").write_text(settings.replace("CartPole-v1", "a_module_of_long_name:Task-v1"))
        summary = json.loads((run / "summary.json").read_text())
        summary |= {"solved": False, "env_id": "a_module_of_long_name:Task-v1"}
        (run / "summary.json").write_text(json.dumps(summary))
    page = Page(report.write([made], tmp_path / "page.html"))
    assert "Bytes of a policy: a_module_of_long_name:Task-v1, actor-bound, threshold, 256x256" in page.text
    assert "no goal" in page.text and "0 of 1" not in page.text


def test_tasks_that_differ_in_much_stand_beside_each_other(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / task, task=task) for task in ("CartPole-v1", "LunarLander-v3")]
    names = [f"setting_{k}" for k in range(9)]
    with open(runs[1] / "config.toml", "a") as file:
        file.write("".join(f"{name} = 1\n" for name in names))
    page = Page(report.write(runs, tmp_path / "page.html"))
    head = "".join(f"<th{kind}>{name}</th>" for kind, name in ((" class=w", "setting"), *(("", r.name) for r in runs)))
    assert head in page.source
    assert "<td class=w>setting_8</td><td>none</td><td>1</td>" in page.source


def test_what_a_fleet_says_is_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    names = dict.fromkeys(("env_id", "runtime", "delegate"), HOSTILE)
    summary |= names | {
        "breakdown": {"actors": {HOSTILE: {"total_s": 1.0}}, "learner": {HOSTILE: HOSTILE}, "actorq": []}
    }
    summary["energy"] = {
        "learner": {"joules": 1.0, "source": HOSTILE},
        "actors": HOSTILE,
        "note": HOSTILE,
        "kwh": HOSTILE,
    }
    (run / "summary.json").write_text(json.dumps(summary))
    actor = dict.fromkeys(("actor_id", "board", "runtime", "python", "refused", "power_source", "steps"), HOSTILE)
    (run / "details.json").write_text(
        json.dumps({"fleet": [actor, HOSTILE], "policy_lag_steps": {HOSTILE: 1, "9": HOSTILE}})
    )
    study = {"env_id": HOSTILE, "actions": "discrete", "rows": [{"recipe": HOSTILE, "agreement": 0.5}, HOSTILE]}
    (run / "fidelity.json").write_text(json.dumps(study))
    (run / "config.toml").write_text(f'"a<b>" = {json.dumps("<script>")}\nprecision = "<b>"\n')
    (run / "run.json").write_text(json.dumps({"starts": [{"command": ["x", HOSTILE], "git": HOSTILE}, HOSTILE]}))
    page = Page(report.write([run], tmp_path / "page.html"))
    assert not {name for name, _ in page.elements} & {"script", "img", "b"}
    assert not any(key.startswith("on") for _, attrs in page.elements for key in attrs)
    assert page.text.count("<script>alert(1)</script>") >= 5
    assert "\u202e" not in page.source and "\x00" not in page.source


def test_bad_input_is_one_line_each_and_the_rest_goes_on(
    tmp_path: Path, log: log_reader.LogReader, capsys: pytest.CaptureFixture[str]
) -> None:
    good, other = make_run(tmp_path / "good"), make_run(tmp_path / "other", task="LunarLander-v3")
    with open(good / "metrics.jsonl", "a") as file:
        file.write('{"wall_s": 41, "env_st')
    bare = make_run(tmp_path / "bare")
    (bare / "metrics.jsonl").unlink()
    (bare / "summary.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    wrong = [tmp_path / "empty", tmp_path / "file", tmp_path / "missing"]
    arguments = ["report", *map(str, [good, good, other, bare, *wrong]), "-o", str(tmp_path / "page.html"), "--json"]
    assert command_line.main(arguments) == errors.EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert [Path(run).name for run in found["runs"]] == ["good", "other", "bare"]
    assert found["left_out"] == [
        f"{good / 'metrics.jsonl'}: line 41 cannot be read, and is left out",
        f"{bare / 'summary.json'}: is no JSON object, and is left out",
        f"{bare}: the run has no metrics: it is left out of the curves",
        f"{tmp_path / 'empty'}: is no run directory: it has neither config.toml nor metrics.jsonl nor summary.json",
        f"{tmp_path / 'file'}: is a file, and no run directory",
        f"{tmp_path / 'missing'}: there is no such directory",
    ]
    page = Page(tmp_path / "page.html")
    assert "by environment steps: CartPole-v1" in page.text and "by environment steps: LunarLander-v3" in page.text


def test_nothing_to_draw_and_nowhere_to_write_end_with_their_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["report", str(tmp_path / "missing")]) == errors.RunError.exit_code
    assert "there is no run to report on" in capsys.readouterr().err
    run = make_run(tmp_path / "run")
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "taken", tmp_path / "file" / "page.html"):
        assert command_line.main(["report", str(run), "-o", str(output)]) == errors.StorageError.exit_code
        assert "the page cannot be written" in capsys.readouterr().err


def test_ten_long_runs_fit_into_five_megabytes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(seed), seed=seed) for seed in range(10)]
    for run in runs:
        rows = (
            {"wall_s": k, "env_steps": 100 * k, "return_mean": k % 97, "published_return_mean": k % 89}
            for k in range(9999)
        )
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report.write(runs, tmp_path / "page.html").stat().st_size < 5_000_000


def test_neither_help_nor_what_trains_loads_the_library_that_draws() -> None:
    modules = "learner.__main__, learner.run.train, learner.run.local_fleet, learner.study.report"
    code = f"import sys, {modules}; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_page_that_cannot_be_drawn_fails_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    (run / "report.html").mkdir()
    report_command.draw(run)
    assert capsys.readouterr().err.startswith("no report is drawn: the page cannot be written")
    (run / "report.html").rmdir()
    report_command.draw(run)
    assert capsys.readouterr().err == f"report: {run / 'report.html'}\n"


def test_a_demo_is_made_again_from_its_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "actorq-learner train --seed 0" in Page(report.write([run], tmp_path / "page.html")).text
    (run / "demo.toml").write_text("")
    text = Page(report.write([run], tmp_path / "page.html")).text
    assert f"actorq-learner demo --config {run}/demo.toml --run-dir {run}-again --envs 4" in text
