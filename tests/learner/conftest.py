"""Fixtures for the learner's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker.program import logs
from tests.fakes import log_reader


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[log_reader.LogReader]:
    """Yields what the learner logs, as people are shown it: a line that is said once is there once."""
    once = logs.Once()
    caplog.handler.addFilter(once)
    yield log_reader.LogReader(caplog, "learner")
    caplog.handler.removeFilter(once)
