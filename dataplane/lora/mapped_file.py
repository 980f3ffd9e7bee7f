"""A file mapped into memory without a descriptor that stays open: thousands of them are, and descriptors are few."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class _Mapping:
    """Pages of a file, until nothing refers to them any more.

    Attributes:
        __array_interface__: Where they are, for NumPy; arrays over them, and views of those, keep this object.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, True), "version": 3}
        weakref.finalize(self, _libc.munmap, address, num_bytes).atexit = False


def map_file(descriptor: int) -> npt.NDArray[np.uint8]:
    """Maps all of an open file, read-only; the mapping outlives the descriptor, and the file's name.

    `mmap.mmap` would keep a duplicate of the descriptor for as long as it lives.

    Args:
        descriptor: The file; not empty.

    Raises:
        OSError: It cannot be mapped.
    """
    num_bytes = os.fstat(descriptor).st_size
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return np.asarray(_Mapping(address, num_bytes))
