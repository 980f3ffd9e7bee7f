"""`make demo`: the whole service on this machine, three customers' adapters in one batch, and a check of all that is claimed.

Starts Postgres, Valkey and both planes, publishes over gRPC, streams, splits, rolls back, is refused, and stops everything again.
Asks nothing and ends by itself; the exit status is 0 only if all checks held.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from demo.conservation import Holdings, returned_to, settled
from demo.prepare import PrepareError, prepare
from demo.show import Screen
from demo.stream import Ask, Expected, Stream, faults_of, follow
from demo.styles import COUNSEL, HAIKU, PIRATE, PIRATE_NEXT, Style, unseen_prompts
from veneer.artifact import version_digest
from veneer.client import CONFIG_NAME, WEIGHTS_NAME, Client
from veneer.controlplane.v1 import catalog_pb2
from veneer.dataplane.v1 import generation_pb2
from veneer.errors import FailedPreconditionError, NotFoundError, VeneerError
from veneer.local.stack import ALL_ROLES, LocalStack
from veneer.operator_client import OperatorClient

TENANTS: Mapping[str, Style] = {"harbor": PIRATE, "garden": HAIKU, "chambers": COUNSEL}
"""Tenant and the adapter that it publishes first."""

_UNITS = 16
_DEADLINE_S = 600.0
_CHANGE_SEEN_S = 5.0
"""A data plane may answer by what it knew until then; the service states 2 s."""


@dataclass(slots=True)
class Story:
    """What the parts of the demonstration share. Owned by the event loop.

    Attributes:
        screen: Where it is told.
        operator: Client with the operator's key.
        clients: Client of each tenant.
        base_digest: Digest of the base that is served.
        styles: Style by digest, of all that was published.
        streams: Every request so far, for the closing table.
        faults: Everything that was not as it must be.
    """

    screen: Screen
    operator: OperatorClient
    clients: dict[str, Client]
    base_digest: str
    styles: dict[str, Style] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def require(self, condition: bool, fault: str) -> None:  # noqa: FBT001 - reads as a sentence
        """Notes a fault unless the condition holds."""
        if not condition:
            self.faults.append(fault)

    def digest_of(self, style: Style) -> str:
        """Digest under which a style was published."""
        return next(digest for digest, published in self.styles.items() if published is style)

    async def ask(self, asks: Iterable[Ask]) -> list[Stream]:
        """Runs requests at the same time to their ends, and judges every answer."""
        streams = [Stream(ask) for ask in asks]
        with self.screen.streams(streams) as on_end:
            await asyncio.gather(*(self.follow(stream, on_end) for stream in streams))
        self.judge(streams)
        return streams

    async def follow(self, stream: Stream, on_end: Callable[[Stream], None] | None = None) -> None:
        """Runs one request to its end and keeps it for the closing table."""
        self.streams.append(stream)
        await follow(self.clients[stream.ask.tenant], stream, on_end=on_end)

    def judge(self, streams: Sequence[Stream]) -> None:
        """Notes what is wrong with answered streams."""
        expected = Expected(self.base_digest, self.styles)
        self.faults += [fault for stream in streams for fault in faults_of(stream, expected)]

    async def publish(self, tenant: str, style: Style, progress: Callable[[int, int], None]) -> catalog_pb2.PublishResponse:
        """Publishes a style, and checks the stated digest against the files themselves."""
        response = await self.clients[tenant].publish(
            style.folder, adapter=style.adapter, base=self.base_digest, label=style.title, progress=progress
        )
        files = {name: hashlib.sha256((style.folder / name).read_bytes()).hexdigest() for name in (CONFIG_NAME, WEIGHTS_NAME)}
        expected = version_digest(tenant, self.base_digest, files)
        self.require(response.version.digest == expected, f"{style.title}: the stated digest is not that of the files")
        self.styles[response.version.digest] = style
        return response


async def tell(story: Story) -> None:
    """Tells the whole story; what goes wrong is in `story.faults`."""
    await _publish(story)
    start = await _warm_up(story)
    await _burst(story)
    after_split = await _split(story)
    await _roll_back(story, after_split)
    await _refusals(story)
    await _retire(story)
    end = await returned_to(start, story.operator)
    story.faults += [f"not given back: {leak}" for leak in end.leaks_since(start)]
    residency = await story.operator.residency()
    story.require(residency.base_digest == story.base_digest, "the data plane states another base digest")
    story.require(residency.engine.max_adapters_in_step >= 2, "no step held two adapters")
    story.require(residency.engine.mixed_steps > 0, "no step held at least two adapters and base rows")
    story.screen.closing_table(story.streams)
    story.screen.engine_table(residency, start=start, end=end)


async def _publish(story: Story) -> None:
    story.screen.step("Three tenants publish their adapters over gRPC")
    with story.screen.uploads() as bar:
        answers = await asyncio.gather(
            *(story.publish(tenant, style, bar(f"{tenant}/{style.adapter}")) for tenant, style in TENANTS.items())
        )
    for answer in answers:
        report = answer.version.report
        story.screen.say(
            f"  {answer.version.owner}/{answer.version.adapter} v{answer.version.number} {answer.version.digest[:8]}: "
            f"rank {report.min_rank} to {report.max_rank}, {report.num_pairs} pairs on {', '.join(report.modules)}"
        )
        for warning in report.warnings:
            story.screen.say(f"    {warning}")


async def _warm_up(story: Story) -> Holdings:
    """One request for each adapter and one for the base; what is held after them is the start that the end is compared with."""
    story.screen.step("The first request of each adapter loads it, the others do not wait for it")
    prompts = unseen_prompts()
    asks = [Ask(phase="cold", tenant=tenant, adapter=style.adapter, prompt=prompts[0]) for tenant, style in TENANTS.items()]
    await story.ask([Ask(phase="cold", tenant="garden", prompt=prompts[0]), *asks])
    return await settled(story.operator)


async def _burst(story: Story) -> None:
    prompts = unseen_prompts()
    asks = []
    for number, prompt in enumerate(prompts[:8]):
        asks += [Ask(phase="burst", tenant=tenant, adapter=style.adapter, prompt=prompt) for tenant, style in TENANTS.items()]
        asks.append(Ask(phase="burst", tenant=list(TENANTS)[number % 3], prompt=prompt))
    story.screen.step(f"{len(asks)} streams at once: three adapters and the base in one batch")
    await story.ask(asks)


async def _split(story: Story) -> list[Stream]:
    """Publishes the second version and splits the traffic; returns one stream for each unit."""
    story.screen.step("harbor publishes pirate v2 and gives it half of the traffic")
    client = story.clients["harbor"]
    with story.screen.uploads() as bar:
        answer = await story.publish("harbor", PIRATE_NEXT, bar("harbor/pirate"))
    story.require(answer.version.number == 2, f"the second version has number {answer.version.number}")
    before = _stable(await client.adapter("pirate"))
    story.require(len(before.arms) == 1, "publishing a second version moved traffic")
    arms = {story.digest_of(PIRATE): 1, story.digest_of(PIRATE_NEXT): 1}
    alias = await client.set_alias("pirate", arms, expected_generation=before.generation)
    await _wait_for_generation(story, alias.generation)

    asks = [_of_unit(unit, phase="split", max_tokens=24) for unit in range(_UNITS)]
    streams = await story.ask(asks)
    again = await story.ask(asks[:4])
    served = {stream.ask.split_unit: stream.served.version for stream in streams if stream.served}
    for stream in (*streams, *again):
        if stream.served is None:
            continue  # judged already
        unit = stream.ask.split_unit
        story.require(stream.served.sticky, f"the arm of {unit} is not sticky")
        story.require(stream.served.version == served[unit], f"{unit} changed its arm")
        story.require(stream.served.generation == alias.generation, f"{unit} was served by generation {stream.served.generation}")
    story.require(len(set(served.values())) == 2, "the split sent all units to one version")
    of_second = sum(version == story.digest_of(PIRATE_NEXT) for version in served.values())
    story.screen.say(
        f"  {len(served) - of_second} units on v1, {of_second} on v2; four of them asked again and kept their version"
    )
    return streams


async def _roll_back(story: Story, of_units: Sequence[Stream]) -> None:
    """Rolls back while streams of both versions run: they end on the version they began with, new ones are on v1."""
    story.screen.step("harbor rolls back while streams of both versions run")
    client = story.clients["harbor"]
    units = [*_few(of_units, story.digest_of(PIRATE)), *_few(of_units, story.digest_of(PIRATE_NEXT))]
    asks = [_of_unit(unit, phase="running", max_tokens=128, ignore_eos=True) for unit in units]
    running = [Stream(ask) for ask in asks]
    late: list[Stream] = []
    with story.screen.streams(running) as on_end:
        tasks = [asyncio.create_task(story.follow(stream, on_end)) for stream in running]
        await asyncio.gather(*(stream.began.wait() for stream in running))
        asked_s = time.monotonic()
        alias = await client.rollback("pirate")
        still = {stream.served.version for stream in running if stream.is_running and stream.served}
        await _wait_for_generation(story, alias.generation)
        seen_s = time.monotonic() - asked_s
        late = [Stream(_of_unit(unit, phase="after", max_tokens=24)) for unit in range(4)]
        tasks += [asyncio.create_task(story.follow(stream, on_end)) for stream in late]
        await asyncio.gather(*tasks)
    story.judge([*running, *late])
    first, second = story.digest_of(PIRATE), story.digest_of(PIRATE_NEXT)
    story.require(still == {first, second}, "streams of both versions should have run at the time of the rollback")
    story.require([arm.version for arm in alias.arms] == [first], "the rollback does not point at v1 alone")
    story.require(seen_s <= _CHANGE_SEEN_S, f"the data plane saw the rollback after {seen_s:.1f} s")
    versions = {stream.ask.split_unit: stream.served.version for stream in of_units if stream.served}
    for stream in running:
        began_on = stream.served.version if stream.served else ""
        story.require(began_on == versions[stream.ask.split_unit], f"{stream.ask.split_unit} ended on another version")
        story.require(stream.num_tokens == stream.ask.max_tokens, f"{stream.ask.split_unit} was cut by the rollback")
    for stream in late:
        story.require(stream.served is not None and stream.served.version == first, "a stream after the rollback is not on v1")
    story.screen.say(
        f"  one call; new requests were on v1 {seen_s:.1f} s after it was made, running streams ended on their version"
    )


async def _refusals(story: Story) -> None:
    story.screen.step("Refused: a foreign adapter, an unknown one; answered by the base where the caller allows it")
    prompt = unseen_prompts()[0]
    foreign = await _refused(story, Ask(phase="foreign", tenant="garden", owner="harbor", adapter="pirate", prompt=prompt))
    unknown = await _refused(story, Ask(phase="unknown", tenant="garden", adapter="nobody", prompt=prompt))
    for name, error in (("foreign", foreign), ("unknown", unknown)):
        story.require(isinstance(error, NotFoundError), f"the {name} adapter was answered with {error!r}")
    if foreign is not None and unknown is not None:
        story.require(
            foreign.message == unknown.message, "foreign and unknown adapters are told apart by the text of the refusal"
        )
        story.screen.say(f"  both: {foreign.status}: {foreign.message}")
    ask = Ask(
        phase="unknown",
        tenant="garden",
        adapter="nobody",
        prompt=prompt,
        fallback=generation_pb2.FALLBACK_MODE_ANY,
    )
    (stream,) = await story.ask([ask])
    served = stream.served
    if served is not None:
        story.require(
            served.fallback and not served.version, "the answer for the unknown adapter does not say that the base gave it"
        )
        story.require(
            served.fallback_reason == generation_pb2.FALLBACK_REASON_NOT_FOUND, "the answer does not say why the base gave it"
        )


async def _retire(story: Story) -> None:
    """Ends the second version: what the device held of it comes back, and nobody is served by it any more."""
    story.screen.step("harbor retires pirate v2; its memory comes back")
    digest = story.digest_of(PIRATE_NEXT)
    await story.clients["harbor"].retire("pirate", digest)
    deadline_s = time.monotonic() + _CHANGE_SEEN_S
    while time.monotonic() < deadline_s:
        if all(version.version != digest for version in (await story.operator.residency()).versions):
            break
        await asyncio.sleep(0.1)
    else:
        story.faults.append(f"the retired version is still held after {_CHANGE_SEEN_S:.0f} s")
    try:
        async for _ in story.clients["harbor"].stream_complete("Hello", adapter="pirate", version=digest):
            story.faults.append("the retired version answered")
            break
    except FailedPreconditionError as error:
        story.screen.say(f"  asked by its digest: {error.status}: {error.message}")


async def _refused(story: Story, ask: Ask) -> VeneerError | None:
    stream = Stream(ask)
    await story.follow(stream)
    story.require(stream.served is None and not stream.text, f"the {ask.phase} adapter was answered")
    return stream.error


async def _wait_for_generation(story: Story, generation: int) -> None:
    """Waits until the data plane answers by a generation of harbor's alias."""
    deadline_s = time.monotonic() + 2 * _CHANGE_SEEN_S
    while time.monotonic() < deadline_s:
        probe = Stream(Ask(phase="probe", tenant="harbor", adapter="pirate", prompt="Hello!", max_tokens=1))
        await follow(story.clients["harbor"], probe)
        if probe.served is not None and probe.served.generation >= generation:
            return
        await asyncio.sleep(0.05)
    story.faults.append(f"the data plane does not see generation {generation} of the alias")


def _of_unit(unit: int | str, *, phase: str, max_tokens: int, ignore_eos: bool = False) -> Ask:
    name = unit if isinstance(unit, str) else f"user-{unit:02}"
    prompts = unseen_prompts()
    return Ask(
        phase=phase,
        tenant="harbor",
        adapter="pirate",
        prompt=prompts[int(name[-2:]) % len(prompts)],
        split_unit=name,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )


def _few(streams: Sequence[Stream], version: str, *, count: int = 3) -> list[str]:
    units = [stream.ask.split_unit for stream in streams if stream.served is not None and stream.served.version == version]
    return units[:count]


def _stable(adapter: catalog_pb2.Adapter) -> catalog_pb2.Alias:
    return next(alias for alias in adapter.aliases if alias.name == "stable")


async def run(stack: LocalStack, screen: Screen) -> list[str]:
    """Makes the tenants, tells the story on a stack that runs, and returns every fault."""
    state = stack.state
    async with AsyncExitStack() as open_clients:
        operator = await open_clients.enter_async_context(stack.operator())
        clients = {}
        for tenant in TENANTS:
            await operator.create_tenant(tenant)
            secret = (await operator.create_key(tenant=tenant, roles=ALL_ROLES, label="demo")).secret
            client = Client(control=state.control, data=state.data, key=secret)
            clients[tenant] = await open_clients.enter_async_context(client)
        story = Story(screen, operator, clients, state.base_digest)
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await tell(story)
        except TimeoutError:
            story.faults.append(f"the story did not end within {_DEADLINE_S:.0f} s")
        except VeneerError as error:
            story.faults.append(f"{error.status}: {error.message}")
        return story.faults


def main() -> int:
    """Runs the demonstration; the exit status is 0 only if every check held."""
    signal.signal(signal.SIGTERM, _stop)
    screen = Screen.of_stdout()
    screen.step("The base model")
    try:
        model = prepare()
    except PrepareError as error:
        screen.say(f"error: {error}")
        return 1
    screen.say(f"  {model}")
    screen.step("Postgres, Valkey, control plane, data plane")
    folder = Path(tempfile.mkdtemp(prefix="veneer-demo-"))
    try:
        with LocalStack(folder, model, report=lambda line: screen.say(f"  {line}")) as stack:
            faults = asyncio.run(run(stack, screen))
    except VeneerError as error:
        faults = [f"{error.status}: {error.message}"]
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder)
        raise
    if faults:
        screen.say(f"\nlogs are kept in {folder}")
    else:
        shutil.rmtree(folder)
    screen.verdict(
        faults,
        checked="Every stream showed its own marker and no other's, base streams none; digests match; adapters and base shared "
        "steps; refusals were refusals; KV pages, leases, arena bytes and tasks are back at the start.",
    )
    return 1 if faults else 0


def _stop(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(main())
