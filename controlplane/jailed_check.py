"""What a child of `controlplane.fork_server` does: locks itself in, checks one adapter, writes the answer, ends.

It talks in lines of JSON on its standard output: `{"jail": null}` when the walls stand, or the cause why they do not; then one
of `{"report": …}`, `{"violations": [[field, description], …]}`, `{"exceeded": "memory"}` and `{"failed": error}`. The
configuration is its standard input.
"""

from __future__ import annotations

import io
import json
import os
import resource
from dataclasses import asdict
from typing import Any, NoReturn

from controlplane.jail import REPORT_FD, Bounds, JailError, confine
from veneer.artifact import ArtifactError, BaseDescription, Limits, check
from veneer.errors import DataLossError

_CONFIG_FD = 0


def main(order: str) -> NoReturn:
    """Runs the child.

    Args:
        order: JSON with base (as `BaseDescription.to_json` writes it), limits, weights_fd, memory_bytes and cpu_s; from our own
            parent, so it is trusted. The files are not.
    """
    fields = json.loads(order)
    base = BaseDescription.from_json(fields["base"])
    limits = Limits(**fields["limits"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    bounds = Bounds(memory_bytes=fields["memory_bytes"], cpu_s=int(used.ru_utime + used.ru_stime) + fields["cpu_s"])
    weights = io.FileIO(fields["weights_fd"], "rb")
    try:
        confine(bounds)
    except (JailError, OSError) as error:
        _end({"jail": str(error)})
    _write({"jail": None})
    try:
        artifact = check(_read_config(limits), weights, base, limits, norms=True)
    except ArtifactError as error:
        _end({"violations": [[violation.field, violation.description] for violation in error.violations]})
    except DataLossError as error:
        _end({"violations": [["adapter_model.safetensors", error.message]]})
    except MemoryError:
        _end({"exceeded": "memory"})
    except Exception as error:  # noqa: BLE001 - whatever a stranger's file does to the check becomes a refusal
        _end({"failed": repr(error)[:200]})
    _end({"report": asdict(artifact.report)})


def _read_config(limits: Limits) -> bytes:
    """Reads the configuration, or one byte more than is allowed, by which the check sees that it is too long."""
    data = b""
    while len(data) <= limits.max_config_bytes:
        more = os.pread(_CONFIG_FD, limits.max_config_bytes + 1 - len(data), len(data))
        if not more:
            break
        data += more
    return data


def _write(message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(REPORT_FD, data) :]


def _end(message: dict[str, Any]) -> NoReturn:
    _write(message)
    os._exit(0)  # nothing of the interpreter's clean-up is needed, and some of its calls are refused
