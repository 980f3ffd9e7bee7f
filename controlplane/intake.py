"""Checks adapter files of strangers in a jailed child process (`controlplane.jail`, `controlplane.jailed_check`)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import veneer
from veneer.artifact import ArtifactError, BaseDescription, Limits, Report
from veneer.errors import UnavailableError, Violation

DEFAULT_MEMORY_BYTES = 512 << 20
"""Memory that a check may take on top of an idle interpreter's."""

_MAX_MESSAGE_BYTES = 1 << 20
_EXIT_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 30.0  # 0.1 s when the machine is idle; a slow start is no fault of the files
_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
# The child has no site directories and no environment: only the standard library and these two places.
_BOOT = "import sys; sys.path += sys.argv[1:3]; from controlplane.jailed_check import main; main(sys.argv[3])"
_PLACES = (str(Path(veneer.__file__).parents[1]), str(Path(np.__file__).parents[1]))
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


async def check_in_jail(
    config_path: Path,
    weights_path: Path,
    base: BaseDescription,
    limits: Limits,
    *,
    timeout_s: float,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
) -> Report:
    """Checks an adapter in a child process that can do nothing but read these two files and answer.

    Each call starts one child of its own; the caller bounds how many run at once.

    Args:
        config_path: The configuration; a regular file.
        weights_path: The weights; a regular file.
        base: The base that the adapter must fit.
        limits: What is allowed.
        timeout_s: Time for the check once the child is ready; also its processor time.
        memory_bytes: Memory for the check.

    Returns:
        What the check found.

    Raises:
        ArtifactError: The adapter is refused, or made the check run out of memory or time.
        UnavailableError: The jail could not be set up; the message names the cause. Nothing was read.
    """
    with ExitStack() as stack:
        config_fd = stack.enter_context(_opened_regular(config_path, _CONFIG))
        weights_fd = stack.enter_context(_opened_regular(weights_path, _WEIGHTS))
        order = {
            "base": base.to_json(),
            "limits": asdict(limits),
            "weights_fd": weights_fd,
            "memory_bytes": memory_bytes,
            "cpu_s": math.ceil(timeout_s),
        }
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-c", _BOOT, *_PLACES, json.dumps(order)),
                stdin=config_fd,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=(weights_fd,),
                env=_ENVIRONMENT,
                cwd="/",
                limit=_MAX_MESSAGE_BYTES,
            )
        except OSError as error:
            raise UnavailableError(f"the jail of the publish check could not be started: {error}") from error
    try:
        ready = await _read_message(child, timeout_s=_START_TIMEOUT_S)
        result = await _read_message(child, timeout_s=timeout_s) if ready == {"jail": None} else {}
        if "exceeded" not in ready and result.get("exceeded") not in ("time", "answer"):
            await _wait(child)  # a signal to a child that is just ending would race with asyncio for its status
    finally:
        await asyncio.shield(_end(child))
    if ready != {"jail": None}:
        slow = f"it was not ready within {_START_TIMEOUT_S:g} s"
        cause = slow if "exceeded" in ready else ready.get("jail", f"its process ended with status {child.returncode}")
        raise UnavailableError(f"the jail of the publish check could not be set up: {cause}")
    if "report" in result:
        return Report.from_fields(result["report"])
    raise ArtifactError.of(_violations(result, child.returncode, timeout_s=timeout_s, memory_bytes=memory_bytes))


@contextmanager
def _opened_regular(path: Path, name: str) -> Iterator[int]:
    """Opens a regular file for reading; neither a link nor a pipe, which would block."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ArtifactError.of([Violation(field=name, description=f"cannot be opened: {error.strerror}")]) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ArtifactError.of([Violation(field=name, description="must be a regular file")])
        yield fd
    finally:
        os.close(fd)


async def _read_message(child: asyncio.subprocess.Process, *, timeout_s: float) -> dict[str, Any]:
    """Reads the child's next line; empty when it has none, takes too long, or writes more than is allowed."""
    assert child.stdout is not None
    try:
        async with asyncio.timeout(timeout_s):
            line = await child.stdout.readline()
            if not line:
                await child.wait()
        message = json.loads(line)
    except TimeoutError:
        return {"exceeded": "time"}
    except json.JSONDecodeError:
        return {}
    except ValueError:  # the line is longer than the limit
        return {"exceeded": "answer"}
    return message if isinstance(message, dict) else {}


async def _wait(child: asyncio.subprocess.Process) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_EXIT_TIMEOUT_S):
            await child.wait()


async def _end(child: asyncio.subprocess.Process) -> None:
    """Ends the child whatever it does, collects its status, and empties its pipe, without which asyncio never closes it."""
    assert child.stdout is not None
    if child.returncode is None:
        with suppress(ProcessLookupError):
            child.kill()
    while await child.stdout.read(65536):  # at most what the pipe holds: its writer is dead, and could not fork
        pass
    await child.wait()


def _violations(result: dict[str, Any], status: int | None, *, timeout_s: float, memory_bytes: int) -> list[Violation]:
    if "violations" in result:
        return [Violation(field=field, description=description) for field, description in result["violations"]]
    if result.get("exceeded") == "memory":
        description = f"the files made the check exceed its memory of {memory_bytes} bytes"
    elif result.get("exceeded") == "time" or status == -signal.SIGXCPU:
        description = f"the files made the check exceed its time of {timeout_s:g} s"
    elif "failed" in result:
        description = f"the files made the check fail: {result['failed']}"
    else:
        description = (
            f"the files made the check exceed its limits ({memory_bytes} bytes, {timeout_s:g} s); it ended with status {status}"
        )
    return [Violation(field="adapter", description=description)]
