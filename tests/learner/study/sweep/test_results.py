"""The figures of a study: QuaRL's relative error, its interval, rank correlations, and what is written of them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.networks import layers
from learner.quantize import bits
from learner.study.sweep import cells, output, page, plan, policies, results

HOSTILE = "<script>alert(1)</script>|x.zip"


def test_the_relative_error_is_quarls() -> None:
    exact = np.array([100.0, 200.0, 300.0])
    assert results.relative_error(exact, exact / 2)[0] == pytest.approx(50)
    assert results.relative_error(exact, exact * 2) == pytest.approx((-100, -100, -100))
    assert results.relative_error(-exact, -2 * exact)[0] == pytest.approx(100)  # worse, where returns are negative
    assert results.relative_error(-exact, -exact / 2)[0] == pytest.approx(-50)
    assert results.relative_error(np.zeros(3), exact) == (None, None, None)
    value, low, high = results.relative_error(np.array([0.0, 0.0, 3.0]), exact)
    assert value is not None and (low, high) == (None, None)  # some resamples of fp32 are all zeros


def test_the_interval_is_paired() -> None:
    rng = np.random.default_rng(0)
    exact = rng.normal(100, 30, 50)
    _, low, high = results.relative_error(exact, exact - 1)
    assert low is not None and high is not None and 0.8 < low < high < 1.2  # far less than the episodes differ
    _, low, high = results.relative_error(exact, rng.permutation(exact) - 1)
    assert low is not None and high is not None and low < -4 < 4 < high


def test_rank_correlation_shares_ranks_among_equals() -> None:
    assert results._rank_correlation([(1, 10), (2, 20), (3, 1000)]) == pytest.approx(1)
    assert results._rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
    assert results._rank_correlation([(1, 1), (1, 2), (2, 3)]) == pytest.approx(np.sqrt(3) / 2)
    assert results._rank_correlation([(1, 1), (1, 2), (1, 3)]) is results._rank_correlation([(1, 1)]) is None


def test_weights_are_rounded_as_quarl_does() -> None:
    rng = np.random.default_rng(0)
    dense = layers.Dense(rng.normal(size=(5, 7)).astype(np.float32), np.ones(5, np.float32), "relu")
    convolution = layers.Conv2D(rng.normal(size=(3, 2, 2, 4)).astype(np.float32), np.ones(3, np.float32), 1, "relu")
    found = bits.rounded_by_layer((convolution, layers.Flatten(), dense), 4)
    assert isinstance(found[0], layers.Conv2D) and isinstance(found[2], layers.Dense)
    step = (abs(dense.kernel.min()) + abs(dense.kernel.max())) / 16
    np.testing.assert_allclose(found[2].kernel, np.rint(dense.kernel / step) * step, atol=1e-6)
    for kernel, rounded in zip(convolution.kernel, found[0].kernel, strict=True):  # each output has its own step
        step = (abs(kernel.min()) + abs(kernel.max())) / 16
        np.testing.assert_allclose(rounded, np.rint(kernel / step) * step, atol=1e-6)
    assert found[2].bias is dense.bias


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Any]:
    """A study of four policies; the third has no cells, and one of the second's failed."""
    request = plan.Request(precisions=("int8-weights", "int8-plain"), bits=(2, 4), aware_bits=(2, 4))
    names = ("dqn-A-v1.zip", "dqn-B-v1.zip", HOSTILE, "ddpg-C-v1.zip")
    entries = [policies.Entry(name, f"/{name}", ".zip", name.split("-")[0], "E-v1", "0") for name in names]
    held = cells.Cells.new(tmp_path / "study", request, entries)
    spread = {"shape": [2, 2], "min": -1.0, "std": 0.5, "histogram": [2, 2]}
    for k, entry in enumerate(entries):
        if entry.name == HOSTILE:
            continue
        for column in request.columns:
            lost = {"random": 90.0, "fp32": 0.0}.get(column, 10.0 * (k + 1))
            record: dict[str, Any] = {"policy": entry.name, "column": column, "failed": "", "wall_s": 1.0}
            record |= {"returns": [100.0 - lost, 102.0 - lost], "bytes": 9, "agreement": 0.9}
            if column == "fp32":
                record |= {"env": "E-v1", "source": "SB3", "outputs": "values"}
                record |= {"weights": [spread | {"max": k + 1.0}]}
            if (k, column) == (1, "w2"):
                record = {"policy": entry.name, "column": column, "failed": "it is no chain", "wall_s": 1.0}
            held.add(record)
    return results.build(held, {HOSTILE: "its environment is unknown"})


def test_means_are_by_column_and_algorithm(found: dict[str, Any]) -> None:
    rows = {(row["column"], row["algorithm"]): row for row in found["summary"]}
    expected = [100 * lost / 101 for lost in (10, 20, 40)]
    assert rows["int8-plain", "all"]["error_mean"] == pytest.approx(np.mean(expected))
    assert rows["int8-plain", "all"]["error_median"] == pytest.approx(expected[1])
    assert rows["int8-plain", "dqn"]["policies"] == 2 and rows["int8-plain", "dqn"]["failed"] == 0
    assert (rows["w2", "all"]["policies"], rows["w2", "all"]["failed"]) == (2, 1)
    assert (rows["int8-plain", "all"]["non_inferior"], rows["int8-plain", "all"]["judged"]) == (0, 3)
    assert found["spread"]["int8-plain"] == {"policies": 3, "rank_correlation": pytest.approx(1)}
    beside = {row["algorithm"]: row for row in found["quarl"]}
    assert beside["dqn"]["ours_percent"] == pytest.approx(np.mean(expected[:2])) and beside["dqn"]["ours_policies"] == 2
    assert (beside["a2c"]["ours_percent"], beside["a2c"]["ours_policies"]) == (None, 0)
    assert all(row["grade"].startswith("R: recalled") for row in found["quarl"])


def test_all_four_forms_tell_the_same(found: dict[str, Any], tmp_path: Path) -> None:
    output.write(tmp_path, found)
    page.write(tmp_path, found)
    text = (tmp_path / output.MARKDOWN).read_text()
    assert "| dqn-B-v1.zip | 101.0 | 11.0 | 19.8 (19.6 to 20.0) | 19.8 (19.6 to 20.0) | failed |" in text
    assert "* dqn-B-v1.zip, w2: it is no chain" in text and "its environment is unknown" in text
    assert "<script>alert(1)</script>\\|x.zip" in text  # a bar would end its cell
    with open(tmp_path / output.CSV) as file:
        rows = {(row["policy"], row["column"]): row for row in csv.DictReader(file)}
    assert len(rows) == len(found["cells"]) == 24
    assert float(rows["dqn-B-v1.zip", "int8-plain"]["error_percent"]) == pytest.approx(100 * 20 / 101)
    drawn = (tmp_path / page.PAGE).read_text()
    assert drawn.count("<svg role=img") == drawn.count("<figcaption") == 4
    assert "<script" not in drawn and "&lt;script&gt;" in drawn and "default-src 'none'" in drawn
    assert (
        "prefers-color-scheme:dark" in drawn
        and "width=device-width" in drawn
        and "http://" not in drawn.replace("http://www.w3.org", "")
    )
    for words in ("int8-plain 19.8 (9.9 to 39.6)", "rounded after training: 2 bits", "int8-weights 1 (3 policies)"):
        assert words in drawn


def test_a_study_with_nothing_yet_is_written_too(tmp_path: Path) -> None:
    entry = policies.Entry("a.zip", "/a.zip", ".zip", "", "", "0")
    held = cells.Cells.new(tmp_path / "study", plan.Request(), [entry])
    output.write(held.path, results.build(held, {}))
    page.write(held.path, results.build(held, {}))
    assert "| a.zip | - | - |" in (held.path / output.MARKDOWN).read_text()
    assert "<h1>" in (held.path / page.PAGE).read_text()
    assert page.render(results.build(held, {"a.zip": "why"})).count("a.zip: why") == 1
