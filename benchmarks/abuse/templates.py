"""A chat template that goes round in circles for some contents, and what other tenants' streams notice of it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path

from benchmarks.control_stack import control_stack, say_calibration
from benchmarks.report import Row
from veneer.client import Client
from veneer.errors import VeneerError

_KINDS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filters": "{% set s = (x ~ ' a b') * 99999 %}{% for a in range(99999) %}{% set t = s | wordwrap(3) | title %}{% endfor %}",
    "lists": "{% set s = range(99999) | list %}{% for a in range(99999) %}{% set t = s | sort | unique | list %}{% endfor %}",
    "format": "{{ '%999999999d' % (x | length) }}",
    "numbers": "{{ (x | length) ** (9 ** 9) }}",
    "slices": "{% set s = x * 9999999 %}{% for a in range(99999) %}{% set t = s[::-1] %}{% endfor %}",
    "set blocks": "{% set n = namespace(s=x) %}{% for a in range(99) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    "containers": "{% set n = namespace(s=[x]) %}{% for a in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "memory": "{% set s = [x] * 999999999 %}",
}
"""What the template does when a message says the kind's name; `x` is that name."""

_ATTACKERS = 8
_STREAMS = 4
_MAX_TOKENS = 512


def measure_templates(folder: Path, *, short: bool) -> list[Row]:
    """Measures the longest gap between tokens of a tenant's streams while another tenant's conversations steer the template.

    Args:
        folder: Model and stack go there.
        short: Two kinds, each for a moment.
    """
    branches = "".join(f"{{% elif x == '{name}' %}}{source}" for name, source in _KINDS.items())
    template = "{% set x = messages[-1].content %}{% if x == '' %}" + branches + "{% endif %}{{ x }}"
    say_calibration()
    with control_stack(folder, chat_template=template) as stack:
        victim = stack.add_tenant("victim").tenant_key
        attacker = stack.add_tenant("attacker").tenant_key
        assert victim is not None, "it was just made"
        assert attacker is not None, "it was just made"
        kinds = list(_KINDS)[:2] if short else list(_KINDS)
        return asyncio.run(_measure(stack.state.data, victim, attacker, kinds=kinds, seconds=2.0 if short else 5.0))


async def _measure(address: str, victim: str, attacker: str, *, kinds: list[str], seconds: float) -> list[Row]:
    async with Client(data=address, key=victim) as client, Client(data=address, key=attacker) as hostile:
        await _gaps(client, 1.0)  # warms up
        alone = await _gaps(client, seconds)
        print(f"alone: longest gap {alone * 1e3:.0f} ms", flush=True)
        gaps = {}
        for kind in kinds:
            ended: Counter[str] = Counter()
            attacks = [asyncio.create_task(_attack(hostile, kind, ended)) for _ in range(_ATTACKERS)]
            try:
                gaps[kind] = await _gaps(client, seconds)
            finally:
                for attack in attacks:
                    attack.cancel()
                await asyncio.gather(*attacks, return_exceptions=True)
            print(f"{kind}: longest gap {gaps[kind] * 1e3:.0f} ms; conversations ended {dict(ended)}", flush=True)
        chats = await _chats(client, hostile)
    worst = max(gaps.values())
    return [
        Row("template_gap_ms", worst * 1e3, unit="ms", target="<= 100"),
        Row("template_alone_gap_ms", alone * 1e3, unit="ms"),
        Row("template_chat_s", chats, unit="s"),
        *(Row(f"template_gap_ms/{kind}", gap * 1e3, unit="ms") for kind, gap in gaps.items()),
    ]


async def _gaps(client: Client, seconds: float) -> float:
    """Returns the longest time between two messages of a stream, of several at the same time."""
    end_s = time.monotonic() + seconds
    return max(await asyncio.gather(*(_longest_gap(client, end_s) for _ in range(_STREAMS))))


async def _longest_gap(client: Client, end_s: float) -> float:
    longest = 0.0
    while time.monotonic() < end_s:
        last_s = None
        stream = client.stream_complete("a b c", max_tokens=_MAX_TOKENS, ignore_eos=True, temperature=0.0)
        async with aclosing(stream):
            async for _ in stream:
                now_s = time.monotonic()
                if last_s is not None:
                    longest = max(longest, now_s - last_s)
                last_s = now_s
                if now_s > end_s:
                    break
    return longest


async def _attack(client: Client, kind: str, ended: Counter[str]) -> None:
    while True:
        try:
            await client.chat(kind, max_tokens=1)
            ended["OK"] += 1
        except VeneerError as error:
            ended[error.status] += 1
            await asyncio.sleep(0)


async def _chats(client: Client, hostile: Client) -> float:
    """Returns the longest that an honest conversation takes beside hostile ones."""
    attacks = [asyncio.create_task(_attack(hostile, "loops", Counter())) for _ in range(_ATTACKERS)]
    longest = 0.0
    try:
        for _ in range(20):
            start_s = time.monotonic()
            await client.chat("hello", max_tokens=1)
            longest = max(longest, time.monotonic() - start_s)
    finally:
        for attack in attacks:
            attack.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)
    return longest
