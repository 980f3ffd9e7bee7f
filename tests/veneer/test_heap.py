"""Threads share a few arenas, and large buffers go back when they are freed."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

_SCRIPT = """
import ctypes, json, sys, threading
from veneer.heap import bound_heap

if sys.argv[1] == "bounded":
    bound_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
barrier = threading.Barrier(6)

def work():
    held = libc.malloc(1000)
    barrier.wait()
    libc.free(held)

threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd rest1 rest2 used free keep".split()]

libc.mallinfo2.restype = Counts
libc.free(libc.malloc(4 << 20))  # so that glibc would keep buffers of this size from now on
before = libc.mallinfo2().hblks
held = libc.malloc(1 << 20)
is_mapped = libc.mallinfo2().hblks > before
libc.free(held)
libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
print(json.dumps([open(sys.argv[2]).read().count("<heap nr"), is_mapped]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library")
def test_threads_share_two_arenas_and_large_buffers_are_given_back(tmp_path: object) -> None:
    def run(kind: str) -> list[object]:
        command = [sys.executable, "-c", _SCRIPT, kind, f"{tmp_path}/{kind}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found: list[object] = json.loads(done.stdout)
        return found

    num_arenas, is_mapped = run("bounded")
    assert (num_arenas, is_mapped) == (2, True)
    num_arenas, is_mapped = run("free")
    assert isinstance(num_arenas, int)
    assert num_arenas > 2, "the test can fail"
    assert not is_mapped


_TRIMMING = """
import asyncio, ctypes
from veneer.heap import keep_trimmed

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

async def main():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    held = [libc.malloc(16_000) for _ in range(4000)]
    for address in held:
        ctypes.memset(address, 1, 16_000)
    for number, address in enumerate(held):
        if number % 8:
            libc.free(address)
    before = resident()
    task = asyncio.create_task(keep_trimmed(interval_s=0.01))
    async with asyncio.timeout(60):
        while resident() > before - (30 << 20):
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

asyncio.run(main())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of another C library")
def test_what_lies_free_between_what_is_held_is_given_back() -> None:
    subprocess.run([sys.executable, "-c", _TRIMMING], check=True, timeout=100)


_COLLECTING = """
import asyncio, gc, weakref
from veneer.heap import keep_trimmed

class Held:
    pass

def leave_a_cycle():
    held = Held()
    held.itself = held
    return weakref.ref(held)

async def main():
    gc.disable()
    task = asyncio.create_task(keep_trimmed(interval_s=0.01))
    async with asyncio.timeout(60):
        while not gc.get_freeze_count():
            await asyncio.sleep(0.01)
        left = leave_a_cycle()
        while left() is not None:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

asyncio.run(main())
"""


def test_what_was_there_is_exempt_and_cycles_that_come_later_are_collected() -> None:
    subprocess.run([sys.executable, "-c", _COLLECTING], check=True, timeout=100)
