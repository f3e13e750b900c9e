"""Rows and the summary are made of what each stage says."""

from __future__ import annotations

from typing import Any

import pytest

from learner.run.reports import metrics, summary


def test_what_two_stages_count_by_one_name_is_added_up() -> None:
    parts = [{"messages_refused": 2, "messages": 5}, {"messages_refused": 3, "bytes_sent": 7}]
    assert metrics.merged(parts) == {"messages_refused": 5, "messages": 5, "bytes_sent": 7}


def test_a_summary_has_every_key_whatever_stage_says_it() -> None:
    stage: dict[str, Any] = {name.format("int8"): None for name in summary._KEYS if name != "energy"}
    first = {**stage, "precision": "int8", "messages_refused": {"shape": 1, "value": 1}}
    made = summary.make([first, {"messages_refused": {"shape": 2}}], {"kwh": 1.0})
    assert made["messages_refused"] == {"shape": 3, "value": 1}
    assert made["energy"] == {"kwh": 1.0}
    assert "int8_return_mean" in made and "policy_int8_bytes" in made
    del first["updates"]
    with pytest.raises(KeyError, match="updates"):
        summary.make([first], {})


def test_returns_just_below_zero_are_no_minus_zero() -> None:
    told = {"int8_returns": [-246.3, -0.2], "int8_return_mean": -123.25, "int8_return_std": 123.05}
    assert summary._spread(told, "int8") == "-123.2 +- 123.0 over 2 episodes (-246 to 0)"
    assert summary._interval((-0.04, 0.04)) == "0.0 to 0.0"
