"""Python's garbage collector in a process that must not pause."""

from __future__ import annotations

import gc


def tame() -> None:
    """Exempts what lives already from collection and lets young objects pile up longer; called once all is loaded.

    The step loop makes no reference cycles, so its records are freed by counting alone. A full pass over 10,000 queued requests
    takes tens of milliseconds; with these thresholds one comes after so many surviving objects that it is rare.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)
