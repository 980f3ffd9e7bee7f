"""What a process that must not pause asks of Python."""

from __future__ import annotations

import sys

from dataplane.engine.collector import share


def test_a_thread_that_waits_for_pythons_lock_has_it_within_a_millisecond() -> None:
    before = sys.getswitchinterval()
    try:
        share()
        assert sys.getswitchinterval() < 0.001
    finally:
        sys.setswitchinterval(before)
