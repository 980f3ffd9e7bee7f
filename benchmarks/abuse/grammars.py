"""Structured outputs that take all the work that they may, and what is left of another tenant's tokens beside them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import psutil

from benchmarks.control_stack import say_calibration
from benchmarks.report import Row
from demo.prepare import prepare
from veneer.client import Client
from veneer.dataplane.v1.generation_pb2 import Chunk
from veneer.errors import VeneerError
from veneer.local.stack import LocalStack

_HONEST = {"json": json.dumps({"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 500})}
_KINDS: dict[str, dict[str, str]] = {
    "nested counts": {"regex": "(g{500}){800}"},
    "optional words": {"regex": r"(\w?\s?){900}"},
    "many words": {"regex": r"(\w{1,20}[ ,.]{1,3}){1,2000}"},
    "pattern": {"json": json.dumps({"type": "string", "pattern": "^([a-z]{1,40} ){1,400}[.]$"})},
    "long string": {"json": json.dumps({"type": "string", "minLength": 20_000, "maxLength": 20_000})},
    "many properties": {"json": json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}})},
    "alternatives": {
        "json": json.dumps(
            {"anyOf": [{"type": "object", "properties": {f"k{j}": {} for j in range(i % 7)} | {f"u{i}": {}}} for i in range(100)]}
        )
    },
    "multiples": {"json": json.dumps({"type": "integer", "multipleOf": 9973})},
    "compiles for ever": {"json": json.dumps({"type": "integer", "multipleOf": 99_999_989})},
    "ambiguous": {"grammar": 'start: e\ne: e e | e e e | "a" | /[a-z ]/'},
    "single letters": {"grammar": "start: c{1,100000}\nc: /./"},
    "alternations": {
        "grammar": "start: (" + " | ".join(f"T{i}" for i in range(200)) + ")+\n"
        + "\n".join(f"T{i}: /[a-z]{{1,{i + 2}}}[0-9]{{0,{i}}}/" for i in range(200))
    },
}  # fmt: skip
_ATTACKERS = 4
_STREAMS = 2
_MIB = 1 << 20


def measure_grammars(folder: Path, *, short: bool) -> list[Row]:
    """Measures a tenant's tokens a second beside another tenant's heavy structured outputs.

    `grammar_victim_share` is the least over the kinds of: tokens/s of the victim's two streams beside four callers that send a
    kind over and over, each time as another text, divided by its tokens/s beside as many callers of that tenant whose
    structured output is an honest one. The honest figure is measured before and after all kinds, and the mean is taken.

    Args:
        folder: The stack goes there.
        short: Three kinds, each for a moment.
    """
    say_calibration()
    with LocalStack(folder / "stack", prepare()) as stack:
        victim, attacker = stack.add_tenant("victim").tenant_key, stack.add_tenant("attacker").tenant_key
        assert victim is not None, "it was just made"
        assert attacker is not None, "it was just made"
        kinds = list(_KINDS)[:3] if short else list(_KINDS)
        process = psutil.Process(stack.data_plane.process.pid)
        return asyncio.run(_measure(stack.state.data, victim, attacker, process, kinds=kinds, seconds=3.0 if short else 8.0))


async def _measure(
    address: str, victim: str, attacker: str, process: psutil.Process, *, kinds: list[str], seconds: float
) -> list[Row]:
    async with Client(data=address, key=victim) as client, Client(data=address, key=attacker) as hostile:
        await _beside(client, hostile, _HONEST, seconds=2.0)  # warms up
        before = await _beside(client, hostile, _HONEST, seconds=seconds)
        resident = _resident(process)
        rates = {kind: await _beside(client, hostile, _KINDS[kind], seconds=seconds, name=kind) for kind in kinds}
        grown = _resident(process) - resident
        honest = (before + await _beside(client, hostile, _HONEST, seconds=seconds)) / 2
    print(
        f"beside honest ones: {honest:.1f} tokens/s; resident memory of the data plane grew by {grown / _MIB:.0f} MiB", flush=True
    )
    return [
        Row("grammar_victim_share", min(rates.values()) / honest, target=">= 0.9"),
        Row("grammar_resident_mib", grown / _MIB, unit="MiB"),
        *(Row(f"grammar_victim_share/{kind}", rate / honest) for kind, rate in rates.items()),
    ]


async def _beside(client: Client, hostile: Client, kind: dict[str, str], *, seconds: float, name: str = "honest") -> float:
    """Returns the victim's tokens a second beside callers of a kind."""
    ended: Counter[str] = Counter()
    attacks = [asyncio.create_task(_attack(hostile, kind, number, ended)) for number in range(_ATTACKERS)]
    try:
        await asyncio.sleep(1.0)  # they have begun
        start_s = time.monotonic()
        counts = await asyncio.gather(*(_count(client, start_s + seconds) for _ in range(_STREAMS)))
        rate = sum(counts) / (time.monotonic() - start_s)
    finally:
        for attack in attacks:
            attack.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)
    print(f"{name}: {rate:.1f} tokens/s of the victim; structured outputs ended {dict(ended)}", flush=True)
    return rate


async def _count(client: Client, end_s: float) -> int:
    """Counts the tokens of one stream after the other until a time."""
    count = 0
    while time.monotonic() < end_s:
        stream = client.stream_complete("Once upon a time", max_tokens=1024, ignore_eos=True, temperature=0.0)
        async with aclosing(stream):
            async for part in stream:
                count += len(part.ids) if isinstance(part, Chunk) else 0
                if time.monotonic() > end_s:
                    break
    return count


async def _attack(client: Client, kind: dict[str, str], number: int, ended: Counter[str]) -> None:
    (field, text), count = next(iter(kind.items())), 0
    while True:
        count += 1
        unlike = _another(field, text, 1000 * number + count)
        stream = client.stream_complete("a", max_tokens=1024, temperature=1.0, seed=count, structured_outputs={field: unlike})
        try:
            async with aclosing(stream):
                async for _ in stream:
                    pass
            ended["OK"] += 1
        except VeneerError as error:
            ended[error.status] += 1
            await asyncio.sleep(0)


def _another(field: str, text: str, number: int) -> str:
    """Returns the same constraint as a text that was never sent."""
    match field:
        case "json":
            return json.dumps(json.loads(text) | {"title": str(number)})
        case "regex":
            return f"({text})|Z{number}"
        case _:
            return f"{text}\n// {number}"


def _resident(process: psutil.Process) -> int:
    return sum(int(one.memory_info().rss) for one in (process, *process.children(recursive=True)))
