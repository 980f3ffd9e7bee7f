"""A load that tries everything at once on a real engine: who asks what, who leaves when, what happens to the adapters."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from dataplane.choices import seed_of
from dataplane.engine.client import EngineClient
from dataplane.engine.messages import Delta, Event, Failed, Moved, NotFinite, Pause, Resume, Sampling, Submit, Tokens, Wanted
from dataplane.engine.runner import model_features
from dataplane.frontend.detokenizer import Detokenizer, StopStrings
from dataplane.frontend.tokenizer import Tokenizer
from dataplane.lora.image import ImagePair, build_image
from dataplane.lora.image_file import write_image
from dataplane.model.architecture import Architecture
from dataplane.token_stream import TokenStream
from tests.dataplane.engine.conftest import EOS, SPOKEN_VOCAB
from veneer.errors import VeneerError

MAX_CONTEXT = 64
GOOD = {"good1": (1, range(7)), "good3": (3, range(7)), "good5": (5, (0, 2)), "good8": (8, range(7)), "good16": (16, range(7)),
        "good17": (16, (6,)), "torn": (2, range(7))}  # fmt: skip
"""Rank and slices of versions that answer; the image of `torn` arrives damaged every other time."""
BAD = ("bad0", "bad1", "bad2", "bad3")
"""Versions of finite weights whose products are not: taken away when they are reported."""
LOST = "lost"
"""A version whose image cannot be had."""
TENANTS = {"small": 1, "large": 3, "flood": 1}
_STARTS = [tuple(random.Random(i).randrange(1, SPOKEN_VOCAB) for _ in range(26)) for i in range(4)]
_GRAMMAR = llguidance.LLMatcher.grammar_from_regex("[a-z ]{3,30}")


def write_images(folder: Path, form: Architecture) -> dict[str, Path]:
    """Writes an image of each version but the lost one, and a damaged one of `torn`."""
    generator = np.random.default_rng(5)
    features = model_features(form)
    paths: dict[str, Path] = {}

    def write(version: str, rank: int, slices: Iterable[int], size: float) -> None:
        pairs = []
        for layer, index in itertools.product(range(form.num_layers), slices):
            a, b = (
                generator.standard_normal(shape).astype(np.float32) * np.float32(size)
                for shape in ((rank, features[index][0]), (features[index][1], rank))
            )
            pairs.append(ImagePair(layer, index, 0.5, a, b))
        image = build_image(
            pairs, version=version, base_digest="", dtype="float32", num_layers=form.num_layers, num_slices=len(features)
        )
        paths[version] = folder / version
        write_image(paths[version], image)

    for version, (rank, slices) in GOOD.items():
        write(version, rank, slices, 0.2)
    for version in BAD:
        write(version, 2, range(7), 1e25)
    damaged = bytearray(paths["torn"].read_bytes())
    damaged[-5] ^= 1
    paths["damaged"] = folder / "damaged"
    paths["damaged"].write_bytes(damaged)
    return paths


@dataclass(slots=True)
class Ledger:
    """What every request asked and how it ended.

    Attributes:
        asked: Requests by id.
        ends: How each reader saw its request end: a finish reason, a status, or `left`.
        answers: Tokens of those that finished.
        events: Last events by request, as they left the engine.
        lasting: Deltas that came after a last event.
    """

    asked: dict[str, Submit] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    lasting: list[str] = field(default_factory=list)

    def note(self, events: Iterable[Event]) -> None:
        """Takes events as they leave the engine."""
        for event in events:
            for delta in event.deltas() if isinstance(event, Tokens) else ():
                if self.events[delta.request_id]:
                    self.lasting.append(delta.request_id)
                self.events[delta.request_id] += delta.finish is not None
            if isinstance(event, Failed):
                self.events[event.request_id] += 1


class Load:
    """Drives one engine. Owned by the event loop.

    Args:
        client: The engine.
        images: Images by version.
        tokenizer: The base's.
        ledger: Where everything is noted.
        seed: Of all choices that are made here.
    """

    def __init__(self, client: EngineClient, images: dict[str, Path], *, tokenizer: Tokenizer, ledger: Ledger, seed: int) -> None:
        self._client = client
        self._images = images
        self._tokenizer = tokenizer
        self.ledger = ledger
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self.quarantined: set[str] = set()
        self._later: list[asyncio.TimerHandle] = []
        client.on_wanted, client.on_moved, client.on_not_finite = self._bring, self._moved, self._quarantine

    async def run(self, *, requests: int, seconds: float, num_workers: int = 20) -> None:
        """Asks so often at least and for so long at least, then waits until everything that was asked has ended."""
        end = asyncio.get_running_loop().time() + seconds

        def is_over() -> bool:
            return len(self.ledger.asked) >= requests and asyncio.get_running_loop().time() >= end

        try:
            async with asyncio.timeout(seconds + 300):  # far more than it takes, since the machine may be busy
                await asyncio.gather(self._meddle(is_over), *(self._work(is_over) for _ in range(num_workers)))
        except TimeoutError as error:
            open_ = [submit for name, submit in self.ledger.asked.items() if name not in self.ledger.ends]
            raise AssertionError(f"never ended, in {await self._client.state()}: {open_}") from error
        for handle in self._later:
            handle.cancel()

    def forget_adapters(self) -> None:
        """Takes every version away."""
        for version in (*GOOD, *BAD):
            self._client.unstage(version, drop_device=True)

    async def _work(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            count = self._random.choices([1, 2, 3, 40], [20, 4, 2, 1])[0]
            await asyncio.gather(*map(self._read, self._ask(count)))

    def _ask(self, count: int) -> list[Submit]:
        """One request with `count` choices, or a flood of requests of one tenant."""
        rng = self._random
        length = rng.choice([1, 3, 9, 17, 26, 40])
        start = rng.choice(_STARTS)[: rng.choice([4, 13, 26])]
        prompt = (start + tuple(rng.randrange(1, SPOKEN_VOCAB) for _ in range(length)))[:length]
        tenant = "flood" if count > 3 else rng.choice(list(TENANTS))
        version = rng.choices([None, *GOOD, rng.choice(BAD), LOST], [8, *[2] * len(GOOD), 1, 1])[0]
        wishes = self._wishes()
        submit = Submit(
            request_id="",
            tenant=tenant,
            prompt=prompt,
            sampling=Sampling(**wishes),
            version=version,
            active_from=rng.randrange(length) if version and rng.random() < 0.2 else 0,
            deadline_s=rng.choice([0.001, 0.02, 0.1, 1.0]) if rng.random() < 0.15 else None,
            weight=TENANTS[tenant],
            priority=rng.randrange(3),
            cache_salt="" if rng.random() < 0.2 else f"secret of {tenant}",
        )
        return [
            replace(
                submit,
                request_id=f"r{next(self._numbers)}",
                sampling=replace(submit.sampling, seed=seed_of(wishes["seed"], index)),
            )
            for index in range(count)
        ]

    def _wishes(self) -> dict[str, Any]:
        rng = self._random
        wishes: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 8, 14, 24]), "temperature": 0.0, "seed": rng.getrandbits(63)}
        if rng.random() < 0.4:
            wishes |= {"temperature": 0.9, "top_p": 0.9, "top_k": rng.choice([0, 20])}
        if rng.random() < 0.25:
            wishes |= {
                "repetition_penalty": 1.2,
                "frequency_penalty": 0.4,
                "bad_words": ((7,), (8, 9)),
                "logit_bias": ((3, 2.0),),
            }
        if rng.random() < 0.15:
            wishes |= {"logprobs": 2, "prompt_logprobs": rng.choice([None, 1])}
        if rng.random() < 0.1:
            wishes |= {"grammar": _GRAMMAR, "stop_token_ids": (EOS,)}
        elif rng.random() < 0.3:
            wishes |= {"stop_token_ids": tuple(range(0, SPOKEN_VOCAB, 11)), "min_tokens": min(2, wishes["max_tokens"])}
        return wishes

    async def _read(self, submit: Submit) -> None:
        """Reads a request in one of many manners and notes how it ended."""
        rng, ledger = self._random, self.ledger
        ledger.asked[submit.request_id] = submit
        readers = (self._whole, self._slowly, self._leaving, self._cancelled, self._never_reading, self._as_text)
        reader = rng.choices(readers, [10, 2, 2, 2, 1, 2])[0]
        ids: list[int] = []
        end = "left"
        try:
            end = await reader(submit, ids) or "left"
        except VeneerError as error:
            end = error.status
        ledger.ends[submit.request_id] = end
        if end in ("stop", "length"):
            ledger.answers[submit.request_id] = tuple(ids)

    async def _whole(self, submit: Submit, ids: list[int]) -> str | None:
        finish = None
        async for delta in self._client.submit(submit):
            assert delta.index == len(ids)
            ids += delta.ids
            finish = delta.finish
        return finish

    async def _slowly(self, submit: Submit, ids: list[int]) -> str | None:
        finish = None
        async for delta in self._client.submit(submit):
            ids += delta.ids
            finish = delta.finish
            if self._random.random() < 0.3:
                self._client._send(
                    self._random.choice([Pause, Resume])(submit.request_id)
                )  # storms of what the client does itself
            await asyncio.sleep(self._random.choice([0.0, 0.003, 0.03]))
            self._client._send(Resume(submit.request_id))
        return finish

    async def _leaving(self, submit: Submit, ids: list[int]) -> str | None:
        async with contextlib.aclosing(self._client.submit(submit)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                ids += delta.ids
                if delta.finish is not None:
                    return delta.finish
                if self._random.random() < 0.3:
                    return None
        return None

    async def _cancelled(self, submit: Submit, ids: list[int]) -> str | None:
        reading = asyncio.create_task(self._whole(submit, ids))
        await asyncio.wait([reading], timeout=self._random.choice([0.0, 0.001, 0.01, 0.05]))
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await reading
        return None

    async def _never_reading(self, submit: Submit, ids: list[int]) -> str | None:
        async with contextlib.aclosing(self._client.submit(submit)) as deltas:  # type: ignore[type-var]
            ids += (await anext(deltas)).ids
            await asyncio.sleep(self._random.choice([0.05, 0.2]))
        return None

    async def _as_text(self, submit: Submit, ids: list[int]) -> str | None:
        """Through the buffer of a stream, whose reader may be too slow for it."""
        stream = TokenStream(
            self._client.submit(submit),
            detokenizer=Detokenizer(self._tokenizer.pieces),
            stops=StopStrings(()),
            stop_ids=submit.sampling.stop_token_ids,
            max_bytes=1 << 16,
            max_waiting=4,
            slow_reader_s=0.02,
        )
        try:
            while True:
                piece = await stream.next()
                ids += piece.ids
                if piece.end is not None:
                    return piece.end.reason
                await asyncio.sleep(self._random.choice([0.0, 0.0, 0.0, 0.1]))
        finally:
            await stream.close()

    async def _meddle(self, is_over: Callable[[], bool]) -> None:
        """Takes versions away at random; who waits for one gets it again."""
        while not is_over():
            await asyncio.sleep(self._random.choice([0.0, 0.01, 0.05]))
            version = self._random.choice(list(GOOD))
            self._client.unstage(version, drop_device=self._random.random() < 0.5)

    def _bring(self, wanted: Wanted) -> None:
        """Brings an image soon, or says that it cannot be had."""
        delay_s = self._random.choice([0.0, 0.0, 0.005, 0.03])
        self._later.append(asyncio.get_running_loop().call_later(delay_s, self._stage, wanted.version))

    def _stage(self, version: str) -> None:
        if version == LOST or version in self.quarantined:
            self._client.fail(version, status="FAILED_PRECONDITION", message="it cannot be had")
            return
        damaged = version == "torn" and self._random.random() < 0.5
        self._client.stage(version, self._images["damaged" if damaged else version])

    def _moved(self, moved: Moved) -> None:
        if moved.place == "corrupt":
            self._stage(moved.version)

    def _quarantine(self, report: NotFinite) -> None:
        """Does what the control plane's word does: nobody gets the version any more."""
        assert report.version is not None
        self.quarantined.add(report.version)
        self._client.unstage(report.version, drop_device=True)
        self._client.fail(report.version, status="FAILED_PRECONDITION", message="it is quarantined")


async def alone(client: EngineClient, submit: Submit) -> list[Delta]:
    """Runs a request by itself."""
    stream: AsyncIterator[Delta] = client.submit(replace(submit, deadline_s=None, cache_salt=""))
    return [delta async for delta in stream]
