from __future__ import annotations

import asyncio
import gc
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.veneer.raw_server import RawServer, reset
from tests.veneer.scripted import KEY, LAST, SERVED, Catalog, Generation, scripted_plane
from veneer.client import CONFIG_NAME, WEIGHTS_NAME, Client
from veneer.connection import Connection
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, VeneerError
from veneer.loop_thread import LoopThread
from veneer.operator_client import OperatorClient
from veneer.organization_client import OrganizationClient
from veneer.sync_client import SyncClient, SyncOperatorClient, SyncOrganizationClient


@pytest.fixture
def thread() -> LoopThread:
    return LoopThread.shared()


@pytest.fixture
def generation() -> Generation:
    return Generation()


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def address(thread: LoopThread, generation: Generation, catalog: Catalog) -> Iterator[str]:
    """Where a plane listens that runs in the client's own thread."""
    server = scripted_plane(generation, catalog)
    yield thread.run(server.start()).callers
    thread.run(server.stop(grace_s=0))


@pytest.fixture
def client(address: str) -> Iterator[SyncClient]:
    with SyncClient(control=address, data=address, key=KEY, timeout_s=60) as client:
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_NAME).write_bytes(b'{"r": 8}')
    (tmp_path / WEIGHTS_NAME).write_bytes(bytes(range(256)) * 10_000)
    return tmp_path


def ended(thread: LoopThread, generation: Generation) -> bool:
    """Waits until the service has seen its stream end."""
    return thread.run(asyncio.wait_for(generation.ended.wait(), 60))


def surface(kind: type) -> dict[str, inspect.Signature]:
    return {name: inspect.signature(one) for name, one in inspect.getmembers(kind, inspect.isroutine) if name[0] != "_"}


@pytest.mark.parametrize(
    ("ours", "theirs"), [(SyncClient, Client), (SyncOperatorClient, OperatorClient), (SyncOrganizationClient, OrganizationClient)]
)
def test_methods_arguments_and_results_are_those_of_the_asynchronous_client(ours: type, theirs: type[Connection]) -> None:
    expected = surface(theirs)
    for name, signature in expected.items():
        returns = str(signature.return_annotation).replace("AsyncGenerator", "Stream")
        expected[name] = signature.replace(return_annotation=returns)
    assert surface(ours) == expected
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert not [name for name in expected if inspect.iscoroutinefunction(getattr(ours, name)) or not getattr(ours, name).__doc__]


def test_a_stream_is_an_iterator(client: SyncClient, generation: Generation) -> None:
    generation.scripts = [[SERVED, LAST]]
    assert list(client.stream_complete("hi", adapter="tone")) == [SERVED.served, SERVED.chunk, LAST.chunk, LAST.finish]
    assert generation.requests[0].adapter.adapter == "tone"


def test_errors_are_the_same_ones(client: SyncClient, generation: Generation) -> None:
    generation.scripts = [[ResourceExhaustedError("full", retry_after_s=2.0)]]
    with pytest.raises(ResourceExhaustedError) as caught:
        next(client.stream_complete("hi"))
    assert caught.value.retry_after_s == 2.0


def close(stream: Any) -> None:
    stream.close()


def leave(stream: Any) -> None:
    with pytest.raises(ZeroDivisionError), stream:
        _ = 1 / 0


@pytest.mark.parametrize("end", [close, leave])
def test_closing_a_stream_cancels_its_request(
    client: SyncClient, thread: LoopThread, generation: Generation, end: Callable[[Any], None]
) -> None:
    generation.scripts = [[SERVED, asyncio.Event()]]
    stream = client.stream_complete("hi")
    assert next(stream) == SERVED.served
    end(stream)
    assert ended(thread, generation)
    assert list(stream) == []
    stream.close()


def test_a_stream_that_is_dropped_cancels_its_request(client: SyncClient, thread: LoopThread, generation: Generation) -> None:
    generation.scripts = [[SERVED, asyncio.Event()]]
    for _ in client.stream_complete("hi"):
        break
    gc.collect()
    assert ended(thread, generation)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_cancels_the_request(client: SyncClient, thread: LoopThread, generation: Generation) -> None:
    class Interrupt(asyncio.Event):
        async def wait(self) -> Any:
            while not has_first or stream._reader._reading is None:  # noqa: ASYNC110  it is set in this very thread
                await asyncio.sleep(0.01)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return await super().wait()

    has_first: list[bool] = []
    generation.scripts = [[pb.GenerateResponse(served=SERVED.served), Interrupt()]]
    stream = client.stream_complete("hi")
    assert next(stream) == SERVED.served
    with pytest.raises(KeyboardInterrupt):
        has_first.append(True)
        next(stream)
    assert ended(thread, generation)


def test_another_thread_may_close_a_stream_that_is_waited_for(
    client: SyncClient, thread: LoopThread, generation: Generation
) -> None:
    generation.scripts = [[pb.GenerateResponse(served=SERVED.served), asyncio.Event()]]
    stream = client.stream_complete("hi")
    assert next(stream) == SERVED.served

    async def waited_for() -> None:
        while stream._reader._reading is None:  # noqa: ASYNC110  it is set in this very thread
            await asyncio.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(next, stream)
        thread.run(waited_for())
        stream.close()
        with pytest.raises(VeneerError) as caught:
            reading.result(60)
    assert caught.value.status == "CANCELLED"
    assert ended(thread, generation)


def test_a_call_that_runs_ends_cancelled_when_the_client_is_closed(
    client: SyncClient, thread: LoopThread, generation: Generation
) -> None:
    generation.scripts = [[SERVED, asyncio.Event()]]
    stream = client.stream_complete("hi")
    assert next(stream) == SERVED.served
    client.close()
    with pytest.raises(VeneerError) as caught:
        list(stream)
    assert caught.value.status == "CANCELLED"
    assert ended(thread, generation)
    with pytest.raises(FailedPreconditionError, match="closed"):
        client.versions("tone")
    client.close()


def test_threads_share_a_client(client: SyncClient, generation: Generation) -> None:
    generation.scripts = [[SERVED, LAST] for _ in range(32)]
    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda index: list(client.stream_complete(f"{index}")), range(32)))
    assert [len(events) for events in streams] == [4] * 32
    assert {request.text for request in generation.requests} == {f"{index}" for index in range(32)}


def test_publish_reports_progress_in_the_thread_that_waits(client: SyncClient, catalog: Catalog, folder: Path) -> None:
    told: list[tuple[int, int, threading.Thread]] = []
    response = client.publish(
        folder, adapter="tone", base="smol", progress=lambda sent, total: told.append((sent, total, threading.current_thread()))
    )
    assert response.version.number == 3
    assert told[-1] == (2_560_008, 2_560_008, threading.main_thread())
    assert {thread for *_, thread in told} == {threading.main_thread()}
    assert client.publish(folder, adapter="tone", base="smol").version.number == 3


def test_what_progress_raises_ends_the_upload(client: SyncClient, folder: Path) -> None:
    def stop(_sent: int, _total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client.publish(folder, adapter="tone", base="smol", progress=stop)


def test_missing_files_are_named(client: SyncClient, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        client.publish(tmp_path, adapter="tone", base="smol")
    assert [violation.field for violation in caught.value.violations] == [CONFIG_NAME, WEIGHTS_NAME]


def test_lists_go_through_all_pages(client: SyncClient) -> None:
    assert [one.name for one in client.adapters()] == [f"adapter-{page}-{index}" for page in range(3) for index in range(2)]


def test_the_clients_own_thread_cannot_wait_for_it(client: SyncClient, thread: LoopThread) -> None:
    async def ask() -> None:
        client.adapters()

    with pytest.raises(FailedPreconditionError, match="own thread"):
        thread.run(ask())


_FORKS = """
import os, sys
from veneer.errors import FailedPreconditionError
from veneer.sync_client import SyncClient

def make():
    return SyncClient(control=sys.argv[1], key=sys.argv[2], timeout_s=60)

def ask_in_child(*ways):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for way in ways:
        try:
            way()
        except FailedPreconditionError as error:
            assert "forked" in str(error)
        else:
            os._exit(7)
    os._exit(8)

assert ask_in_child(lambda: make().adapters()) == 7, "before the first client"
client = make()
assert len(client.adapters()) == 6
assert ask_in_child(client.adapters, lambda: client.stream_complete("hi"), client.close, make) == 8
assert len(client.adapters()) == 6
"""


def test_a_process_that_was_forked_later_is_refused(address: str) -> None:
    done = subprocess.run([sys.executable, "-c", _FORKS, address, KEY], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_process_ends_though_its_client_was_left_open(address: str) -> None:
    script = "import sys; from veneer.sync_client import SyncClient; c = SyncClient(control=sys.argv[1], key=sys.argv[2])\n"
    script += "print(len(c.adapters()))"
    done = subprocess.run([sys.executable, "-c", script, address, KEY], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "6", "")


def test_a_request_that_a_stopping_data_plane_reset_goes_to_another(
    thread: LoopThread, generation: Generation, address: str
) -> None:
    generation.scripts = [[SERVED, LAST]]
    ending = thread.run(RawServer([reset(8)]).__aenter__())
    with SyncClient(data=f"{ending.address},{address}", key=KEY, timeout_s=20.0) as client:
        assert len(list(client.stream_complete("hi"))) == 4
    thread.run(ending.__aexit__())
    assert (ending.num_calls, len(generation.requests)) == (1, 1)
