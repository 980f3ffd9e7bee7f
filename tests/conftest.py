"""What holds for all tests: Hypothesis profiles, and that a skip is a failure in continuous integration."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator

import hypothesis
import pytest

pytest_plugins = ["tests.fixtures.adapters", "tests.fixtures.services", "tests.fixtures.stack"]

_MAY_SKIP = ("gpu", "docker")
_HAS_COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, derandomize=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not _HAS_COMPILER and report.failed and call.excinfo is not None and "no C++ compiler" in str(call.excinfo.value):
        report.outcome = "skipped"  # the native form cannot be built here; the torch form is tested all the same
        report.longrepr = (str(item.path), 0, "needs a C++ compiler")
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and os.environ.get("CI") == "true" and not any(item.get_closest_marker(marker) for marker in _MAY_SKIP):
        report.outcome = "failed"
        report.longrepr = f"skipped in continuous integration: {report.longrepr}"
    return report
