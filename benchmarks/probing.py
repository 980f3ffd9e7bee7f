"""Publishing with a probe: from the start of an upload until a data plane has run the version and its alias has moved."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

from benchmarks.control_stack import base_of, control_stack, say_calibration, two_mb_adapter
from benchmarks.report import Row
from veneer.artifact import BaseDescription
from veneer.client import Client
from veneer.controlplane.v1 import catalog_pb2
from veneer.local.stack import LocalStack


def measure_probing(folder: Path, *, rounds: int) -> list[Row]:
    """Publishes adapters of 2 MB with a probe, one after the other, from one client."""
    with control_stack(folder) as stack:
        base = base_of(folder)
        files = [two_mb_adapter(folder / "adapters", base, number) for number in range(rounds + 1)]
        say_calibration()
        rows = asyncio.run(_publish_each(stack, base, files))
        say_calibration()
    return rows


async def _publish_each(stack: LocalStack, base: BaseDescription, files: list[Path]) -> list[Row]:
    """Returns the median of the seconds that a publish takes; the first one warms up.

    Raises:
        RuntimeError: An alias moved without a probe that compared samples and saw a difference from the base.
    """
    state = stack.state
    waits = []
    async with Client(control=state.control, data=state.data, key=state.tenant_key or "", timeout_s=120.0) as client:
        for number, path in enumerate(files):
            start = time.perf_counter()
            published = await client.publish(path, adapter=f"probed-{number}", base=base.digest, probe=True)
            waits.append(time.perf_counter() - start)
            probe = published.version.report.probe
            sound = probe.state == catalog_pb2.PROBE_STATE_PASSED and probe.num_samples and probe.max_difference
            if not (sound and published.HasField("alias")):
                raise RuntimeError(f"the probe of publish {number} says: {probe}")
    median, longest = statistics.median(waits[1:]), max(waits[1:])
    print(f"publish with a probe: median {median:.3f}, longest {longest:.3f} s", flush=True)
    return [Row("publish_canary_s", median, "s", "<= 4"), Row("publish_canary_s/max", longest, "s")]
