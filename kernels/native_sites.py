"""How native code is told of a fused projection's slices."""

from __future__ import annotations

import ctypes

from kernels.native import NativeFormError
from kernels.sites import Site

_MAX_SLICES = 4
_Each = ctypes.c_int64 * _MAX_SLICES


class Slices(ctypes.Structure):
    """The end of every structure that describes a site; MAX_SLICES and MAX_PARTS in `cpp` are as many."""

    _fields_ = (("count", ctypes.c_int64), ("slice", _Each), ("first", _Each), ("last", _Each))

    @classmethod
    def of(cls, site: Site) -> Slices:
        """Returns the slices of a site.

        Raises:
            NativeFormError: There are more than four.
        """
        if len(site.slices) > _MAX_SLICES:
            raise NativeFormError(f"site {site.name} fuses more than {_MAX_SLICES} projections")
        firsts, lasts = zip(*site.columns, strict=True)
        return cls(len(site.slices), _Each(*site.slices), _Each(*firsts), _Each(*lasts))
