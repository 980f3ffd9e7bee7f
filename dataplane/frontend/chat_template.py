"""The base model's chat template, rendered in processes that are ended when they go beyond their limits.

A template is a stranger's program, and a caller's contents steer it. So no rendering is done here: a few processes
(`veneer.chat.child`) keep the compiled template and render one conversation at a time each; the event loop waits on their
sockets. A process that goes beyond processor time, memory or length ends or is ended, and another takes its place.

A tenant's renderings never take all processes, tenants go by turns, and the renderings of all tenants whose last one was ended
share one process for a while. So a caller with contents that send the template round in circles delays itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from veneer.chat.process import PATIENCE_S, RenderProcess, check_sizes, describe_answer
from veneer.chat.source import SAMPLE
from veneer.chat.wire import PREFIX, Answer, Order, pack_messages, unpack_answer
from veneer.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, UnavailableError, Violation

_log = logging.getLogger(__name__)
_REMEMBERED_S = 60.0
_MAX_REMEMBERED = 1024
_CHUNK_BYTES = 1 << 20

Message = tuple[str, str]
"""Role and content."""


class TemplateError(FailedPreconditionError):
    """The base model's chat template cannot be used."""


class TemplateLimitError(TemplateError):
    """The chat template ran or grew beyond its limits."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the template wrote it.

    Attributes:
        text: The prompt.
        controls: (start, end) of each control token that the template wrote; None: all that the text has are such.
    """

    text: str
    controls: tuple[tuple[int, int], ...] | None


class _EndedError(Exception):
    """A process ended before it answered; the message says why."""


class ChatTemplate:
    """Renders conversations. Owned by the event loop.

    Attributes:
        fault: Why the template cannot be used, once it was tried; empty: it can.

    Args:
        order: The template and its limits.
        num_processes: Conversations that are rendered at the same time; at least 2.
        max_pending: Conversations that may wait; a quarter of these from one tenant.
    """

    def __init__(self, order: Order, *, num_processes: int = 2, max_pending: int = 1024) -> None:
        self.fault = ""
        self._order = order
        self._places = _Places(num_processes, max_pending=max_pending)
        self._processes: list[RenderProcess | None] = [None] * num_processes
        self._was_read = False
        self._is_closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids."""
        return tuple(process.pid for process in self._processes if process is not None)

    async def start(self) -> None:
        """Starts all processes and renders a sample; what is wrong with the template is in `fault` and in the log."""
        try:
            for place in range(len(self._processes)):
                await self._process(place)
            await self.render(SAMPLE, tenant="")
        except InvalidArgumentError:
            pass  # it wants other conversations
        except (TemplateError, UnavailableError) as error:
            _log.warning("the base cannot serve every conversation", extra={"cause": error.message})

    def close(self) -> None:
        """Ends all processes; conversations that are being rendered fail."""
        self._is_closed = True
        for place, process in enumerate(self._processes):
            if process is None:
                continue
            if self._places.is_taken(place):
                process.kill()  # the rendering sees its link break off, and closes it
            else:
                process.end()
                self._processes[place] = None

    async def render(self, messages: Sequence[Message], *, tenant: str) -> RenderedChat:
        """Returns the prompt, ending where the assistant speaks.

        Raises:
            InvalidArgumentError: The template refuses the conversation, e.g. for its order of roles.
            TemplateLimitError: It ran or grew beyond its limits.
            TemplateError: It cannot be used, or does something that is not allowed or not there.
            ResourceExhaustedError: Too many conversations wait.
            UnavailableError: No process could be started, or the node stops.
        """
        self._check()
        place = await self._places.take(tenant)
        # A process in the midst of a rendering is of no use to others, so the rendering goes on when its caller leaves.
        work = asyncio.create_task(self._render_at(place, messages, tenant), name="render-chat")
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also when the caller left
        return await asyncio.shield(work)

    def _check(self) -> None:
        if self._is_closed:
            raise UnavailableError("the node stops")
        if self.fault:
            raise TemplateError(f"the base model's chat template cannot be used: {self.fault}; send a text or token ids")

    async def _render_at(self, place: int, messages: Sequence[Message], tenant: str) -> RenderedChat:
        was_ended = False
        try:
            process = await self._process(place)
            try:
                answer = await self._ask(place, process, pack_messages(messages))
            except _EndedError as error:
                was_ended = True  # also where the machine is to blame: the tenant held a process for as long
                if not process.reached_limit:
                    raise UnavailableError(
                        f"the process that rendered the conversation was ended: {error}", retry_after_s=1.0
                    ) from error
                raise TemplateLimitError(f"the base model's chat template was ended: {error}") from error
            if answer.kind == "memory":
                was_ended = True
                self._drop(place, process)
            return self._read(answer)
        finally:
            if was_ended and not self._is_closed:
                with suppress(TemplateError, UnavailableError):
                    await self._process(place)  # who comes next need not wait for it
            self._places.give_back(place, tenant, was_ended=was_ended)

    def _read(self, answer: Answer) -> RenderedChat:
        match answer.kind:
            case "text":
                return RenderedChat(answer.text, answer.controls)
            case "refused":
                fault = f"the base model's chat template refuses them: {answer.words}"
                raise InvalidArgumentError.of([Violation("chat.messages", fault)])
            case "characters" | "memory":
                raise TemplateLimitError(f"the base model's chat template was ended: {describe_answer(answer, self._order)}")
            case _:
                raise TemplateError(f"the base model's chat template failed: {describe_answer(answer, self._order)}")

    async def _process(self, place: int) -> RenderProcess:
        """Returns a place's process, and starts it where there is none."""
        process = self._processes[place]
        if process is not None:
            return process
        self._check()
        try:
            process = RenderProcess(self._order)
        except OSError as error:
            raise UnavailableError(f"no process to render conversations can be started: {error.strerror}") from error
        self._processes[place] = process
        try:
            answer = await self._ask(place, process, process.greeting)
        except _EndedError as error:
            if self._was_read or not process.reached_limit:
                fault = f"a process to render conversations ended as it began: {error}"
                raise UnavailableError(fault, retry_after_s=1.0) from error
            self.fault = str(error)
        else:
            if answer.kind == "ready":
                self._was_read = True
                return process
            self._drop(place, process)
            self.fault = describe_answer(answer, self._order)
        self._check()
        raise AssertionError("there is a fault")

    async def _ask(self, place: int, process: RenderProcess, data: bytes) -> Answer:
        """Sends a message and returns its answer.

        Raises:
            _EndedError: The process was ended at a limit, or gave no answer in time; its place is free.
            UnavailableError: The node stops, or something else killed the process.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await _exchange(process, data)
        except (OSError, ValueError) as error:
            self._processes[place] = None
            cause = await asyncio.to_thread(process.fall)
            process.link.close()
            if self._is_closed:
                raise UnavailableError("the node stops") from error
            if not cause:
                raise UnavailableError("the process that rendered the conversation was killed", retry_after_s=0.1) from error
            raise _EndedError(cause) from error
        except BaseException:  # this loop ends
            self._drop(place, process)
            raise

    def _drop(self, place: int, process: RenderProcess) -> None:
        self._processes[place] = None
        process.end()


async def _exchange(process: RenderProcess, data: bytes) -> Answer:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(process.link, data)
    header_bytes, body_bytes = check_sizes(await _receive(process, PREFIX.size), process.order)
    return unpack_answer(await _receive(process, header_bytes), await _receive(process, body_bytes))


async def _receive(process: RenderProcess, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        part = await loop.sock_recv(process.link, min(size - len(data), _CHUNK_BYTES))
        if not part:
            raise ConnectionResetError("the process ended")
        data += part
    return bytes(data)


class _Places:
    """Who may render next. Owned by the event loop.

    Tenants go by turns. A tenant holds all places but one at most; tenants whose rendering was ended lately hold one together.
    """

    def __init__(self, num_places: int, *, max_pending: int) -> None:
        assert num_places >= 2, "one tenant would hold all others up"
        self._free = list(range(num_places))
        self._num_places = num_places
        self._max_pending = max_pending
        self._num_pending = 0
        self._taken: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[int]]] = OrderedDict()
        self._ended: OrderedDict[str, float] = OrderedDict()

    def is_taken(self, place: int) -> bool:
        """Says whether somebody has this place."""
        return place not in self._free

    async def take(self, tenant: str) -> int:
        """Waits for a place.

        Raises:
            ResourceExhaustedError: Too many wait, in all or of this tenant.
        """
        line = self._waiting.get(tenant)
        if not line and self._free and self._may_have(tenant):
            self._taken[tenant] += 1
            return self._free.pop()
        if self._num_pending >= self._max_pending or len(line or ()) >= max(self._max_pending // 4, 1):
            raise ResourceExhaustedError("too many conversations wait to be rendered", retry_after_s=1.0)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._num_pending += 1
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result(), tenant, was_ended=False)
            elif turn in self._waiting.get(tenant, ()):
                self._leave(tenant, turn)
            raise

    def give_back(self, place: int, tenant: str, *, was_ended: bool) -> None:
        """Takes a place back, and gives it to the next in turn.

        Args:
            place: The place.
            tenant: Who had it.
            was_ended: The rendering went beyond its limits.
        """
        self._free.append(place)
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        if was_ended:
            self._ended[tenant] = time.monotonic() + _REMEMBERED_S
            self._ended.move_to_end(tenant)
            if len(self._ended) > _MAX_REMEMBERED:
                self._ended.popitem(last=False)
        while self._free and (tenant_next := next(filter(self._may_have, self._waiting), None)) is not None:
            turn = self._waiting[tenant_next][0]
            self._leave(tenant_next, turn)
            if turn.done():
                continue  # its caller has just left
            if tenant_next in self._waiting:
                self._waiting.move_to_end(tenant_next)
            self._taken[tenant_next] += 1
            turn.set_result(self._free.pop())

    def _leave(self, tenant: str, turn: asyncio.Future[int]) -> None:
        line = self._waiting[tenant]
        line.remove(turn)
        self._num_pending -= 1
        if not line:
            del self._waiting[tenant]

    def _may_have(self, tenant: str) -> bool:
        """Says whether a tenant may have one more place."""
        if self._taken[tenant] >= self._num_places - 1:
            return False
        return not self._was_ended(tenant) or not any(self._was_ended(other) for other in self._taken if self._taken[other])

    def _was_ended(self, tenant: str) -> bool:
        return self._ended.get(tenant, 0.0) > time.monotonic()
