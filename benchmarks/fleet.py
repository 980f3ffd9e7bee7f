"""An engine that serves many adapters from little room: their images, and streams that name them one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.contenders.process import Setup
from benchmarks.contenders.veneer import Images
from benchmarks.random_adapters import write_adapter
from benchmarks.workload import SEED, AdapterKey
from dataplane.engine.client import EngineClient
from dataplane.engine.config import EngineConfig
from dataplane.engine.messages import Event, Moved, Sampling, State, Submit, Tokens, Wanted
from dataplane.lora.image_file import MAGIC, write_image
from veneer.artifact import describe_base

PROMPT_TOKENS = 32
_DTYPE = "bfloat16"


class ImageFolder:
    """Images of made adapters of one rank, three in ten on all seven modules, the others on two; made when first asked for.

    Args:
        folder: Where they are kept.
        model: Hugging Face folder of the base.
        rank: Their rank.
    """

    def __init__(self, folder: Path, model: Path, *, rank: int = 8) -> None:
        self.model = model
        self.rank = rank
        self._folder = folder / MAGIC.decode().lower()
        self._base = describe_base(model)
        self.vocab_size = self._base.vocab_size
        self._folder.mkdir(parents=True, exist_ok=True)

    def path(self, number: int) -> Path:
        """Returns where an adapter's image lies."""
        path = self._folder / f"{self.version(number)}.image"
        if not path.exists():
            with tempfile.TemporaryDirectory(prefix="veneer-bench-") as folder:
                key = self._key(number)
                write_adapter(Path(folder), self._base, key)
                write_image(path, Images(Setup(str(self.model), folder), dtype=_DTYPE).image(key))
        return path

    def version(self, number: int) -> str:
        """Returns the version that an adapter's image carries."""
        return hashlib.sha256(self._key(number).name.encode()).hexdigest()

    def _key(self, number: int) -> AdapterKey:
        return AdapterKey(number, self.rank, "all" if number % 10 < 3 else "qv")


@dataclass(slots=True)
class Tenant:
    """Who asks, with its share and its limit of rank rows; 0 for none.

    Attributes:
        num_tokens: Tokens that it was served so far.
    """

    name: str
    weight: int = 1
    max_rank_rows: int = 0
    num_tokens: int = 0


BENCH = Tenant("bench")


@dataclass(slots=True)
class Stream:
    """What came of one request. Times are of the client's clock.

    Attributes:
        number: Its adapter.
        sent_s: When it was sent.
        steps_before: Steps that the engine had run by then.
        times_s: When each of its tokens came.
        first_step: Number of the step that its first token came with.
    """

    number: int
    sent_s: float
    steps_before: int
    times_s: list[float] = field(default_factory=list)
    first_step: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0] - self.sent_s

    @property
    def ttft_steps(self) -> int:
        """Steps that it took to the first token, that of the token counted."""
        return self.first_step - self.steps_before


@dataclass(frozen=True, slots=True)
class Fed:
    """What came of a trace while as many requests were outstanding as there should be.

    Attributes:
        tokens_per_s: Tokens of that time over it.
        loads: Adapters that were loaded in that time.
        load_s: Median time of a load.
        steps: Steps that the engine ran in that time.
        hit_rate: Part of the requests whose adapter was on the device when they came.
        streams: Those that ended, in that order.
    """

    tokens_per_s: float
    loads: int
    load_s: float
    steps: int
    hit_rate: float
    streams: list[Stream]


class _Counting(EngineClient):
    """Counts the engine's steps, as far as they gave tokens."""

    num_steps = 0

    def _receive(self, events: Iterable[Event]) -> None:
        for event in events:
            self.num_steps += isinstance(event, Tokens)
            super()._receive((event,))


class Fleet:
    """A running engine and the images that it was told of. Belongs to one event loop.

    Attributes:
        loads: When each adapter came to the device, and how long that took.
        num_opened: Images that the engine read, checked and mapped.
        times_s: When each token came.
    """

    def __init__(self, client: _Counting, images: ImageFolder) -> None:
        self.loads: list[tuple[float, float]] = []
        self.num_opened = 0
        self.times_s: list[float] = []
        self._client = client
        self._images = images
        self._staged: dict[str, Path] = {}
        self._count = itertools.count()
        self._random = np.random.default_rng(SEED)
        client.on_moved, client.on_wanted = self._moved, self._wanted

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls, images: ImageFolder, *, room: int, streams: int, output_tokens: int, **options: object
    ) -> AsyncIterator[Fleet]:
        """Starts an engine with room for so many adapters, of the largest kind, and stops it at the end."""
        largest = 5 << 20
        settings = {
            "max_sequences": streams,
            "max_step_tokens": max(512, streams),
            "max_context": PROMPT_TOKENS + output_tokens,
            "kv_bytes": 1 << 30,
            "arena_bytes": room * largest,
            "max_slots": room,
            "max_step_rank_rows": 16 * max(room, 64),
            **options,
        }
        client = await _Counting.start(EngineConfig(model_dir=str(images.model), **settings))  # type: ignore[arg-type]
        assert isinstance(client, _Counting), "`start` makes one of its own class"
        try:
            yield cls(client, images)
        finally:
            await client.stop()

    @property
    def num_steps(self) -> int:
        """Steps of the engine so far that gave tokens."""
        return self._client.num_steps

    def stage(self, numbers: Iterable[int]) -> None:
        """Tells the engine of images, of each once."""
        for number in dict.fromkeys(numbers):
            version = self._images.version(number)
            if version not in self._staged:
                self._staged[version] = self._images.path(number)
                self._client.stage(version, self._staged[version])

    async def opened(self, *, timeout_s: float = 600.0) -> None:
        """Waits until the engine has opened every image that it was told of."""
        async with asyncio.timeout(timeout_s):
            while self.num_opened < len(self._staged):  # noqa: ASYNC110  the engine tells of each, and nobody else waits
                await asyncio.sleep(0.01)

    async def state(self) -> State:
        """Asks for the engine's counters."""
        return await self._client.state()

    async def stream(
        self, number: int, *, output_tokens: int, gaps_s: list[float] | None = None, tenant: Tenant = BENCH, rank: int = 0
    ) -> Stream:
        """Runs one request of a tenant to its end; times between its tokens are noted in a list as they come."""
        submit = Submit(
            request_id=str(next(self._count)),
            tenant=tenant.name,
            weight=tenant.weight,
            rank=rank or self._images.rank,
            max_rank_rows=tenant.max_rank_rows,
            prompt=tuple(self._random.integers(10, self._images.vocab_size, PROMPT_TOKENS).tolist()),
            sampling=Sampling(max_tokens=output_tokens, temperature=0.0),
            version=self._images.version(number),
        )
        stream = Stream(number, time.perf_counter(), self._client.num_steps)
        async for delta in self._client.submit(submit):
            if not stream.times_s:
                stream.first_step = self._client.num_steps
            elif gaps_s is not None and delta.ids:
                gaps_s.append(time.perf_counter() - stream.times_s[-1])
            tenant.num_tokens += len(delta.ids)
            now = [time.perf_counter()] * len(delta.ids)
            stream.times_s += now
            self.times_s += now
        return stream

    async def feed(self, trace: Sequence[int], *, outstanding: int, output_tokens: int) -> Fed:
        """Sends a trace so that always as many requests are outstanding; counts from when as many ended until all are sent."""
        self.stage(trace)
        await self.state()
        line, streams = iter(trace), list[Stream]()
        begun: list[tuple[float, State, int]] = []

        async def work() -> None:
            for number in line:
                streams.append(await self.stream(number, output_tokens=output_tokens))
                if len(streams) == outstanding:
                    begun.append((time.perf_counter(), await self.state(), len(self.loads)))

        workers = [asyncio.create_task(work()) for _ in range(outstanding)]
        _, pending = await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
        end_s, end, num_loads = time.perf_counter(), await self.state(), len(self.loads)
        for worker in pending:
            worker.cancel()
        ended = await asyncio.gather(*workers, return_exceptions=True)
        for failure in ended:
            if failure is not None and not isinstance(failure, asyncio.CancelledError):
                raise failure
        start_s, start, loads_before = begun[0]
        tokens = sum(start_s < moment <= end_s for moment in self.times_s)
        hits = end.device_hits - start.device_hits
        misses = end.host_hits - start.host_hits + end.disk_hits - start.disk_hits
        return Fed(
            tokens_per_s=tokens / (end_s - start_s),
            loads=num_loads - loads_before,
            load_s=statistics.median([seconds for _, seconds in self.loads] or [0.0]),
            steps=end.steps - start.steps,
            hit_rate=hits / max(1, hits + misses),
            streams=streams,
        )

    def _wanted(self, wanted: Wanted) -> None:
        """A request waits for an image that was refused before it came: it hears why when that is tried again."""
        if path := self._staged.get(wanted.version):
            self._client.stage(wanted.version, path)

    def _moved(self, moved: Moved) -> None:
        if moved.place == "device":
            self.loads.append((time.perf_counter(), moved.seconds))
        self.num_opened += moved.place == "opened"
