"""Python's garbage collector and lock in a process that must not pause."""

from __future__ import annotations

import gc
import sys

_SWITCH_S = 0.0005


def tame() -> None:
    """Exempts what lives already from collection and lets young objects pile up longer; called once all is loaded.

    The step loop makes no reference cycles, so its records are freed by counting alone. A full pass over 10,000 queued requests
    takes tens of milliseconds; with these thresholds one comes after so many surviving objects that it is rare.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)


def share() -> None:
    """Lets a thread that waits for Python's lock have it after half a millisecond in place of five.

    A thread that checks, builds or opens an adapter holds it for milliseconds, and tokens wait behind: with cold visitors, one
    after the other, the 99th percentile between tokens of eight streams fell from 51 and 121 ms to 42 and 45 (SmolLM2-135M, 2
    cores).
    """
    sys.setswitchinterval(_SWITCH_S)
