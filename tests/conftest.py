"""What holds for all tests: Hypothesis profiles, and that a skip is a failure in continuous integration."""

from __future__ import annotations

import os
from collections.abc import Generator

import hypothesis
import pytest

pytest_plugins = ["tests.fixtures.adapters", "tests.fixtures.services", "tests.fixtures.stack"]

_MAY_SKIP = ("gpu", "docker")

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, derandomize=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and os.environ.get("CI") == "true" and not any(item.get_closest_marker(marker) for marker in _MAY_SKIP):
        report.outcome = "failed"
        report.longrepr = f"skipped in continuous integration: {report.longrepr}"
    return report
