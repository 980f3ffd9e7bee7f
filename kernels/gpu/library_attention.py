"""PyTorch's own attention for chunks that have nothing before them, where a build has one that can be called so."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_MODULE = "torch.nn.attention.varlen"
_FLASH_3 = "flash_attn_interface"
_ARGUMENTS = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size")
_DTYPES = (torch.float16, torch.bfloat16)
_log = logging.getLogger(__name__)


class NoLibraryError(RuntimeError):
    """There is no library whose attention could take the place of ours; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Library:
    """Attention of packed sequences over themselves.

    Attributes:
        name: For the log.
        varlen: `torch.nn.attention.varlen.varlen_attn`.
        options: Its arguments that do not depend on the step.
    """

    name: str
    varlen: Callable[..., Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, starts: Tensor, longest: int, window: int | None) -> Tensor:
        """Attends causally.

        Args:
            q: [T, heads, head_dim]; rows may lie apart here and below.
            k: [T, kv_heads, head_dim].
            v: [T, kv_heads, head_dim].
            starts: int32 [sequences + 1], where each begins, then T.
            longest: Rows of the longest.
            window: A row sees this many tokens, itself included; None for all before it.

        Returns:
            [T, heads, head_dim].
        """
        reach = -1 if window is None else window - 1
        return self.varlen(q, k, v, starts, starts, longest, longest, window_size=(reach, 0), **self.options)


def find_library(*, dtype: torch.dtype, scale: float, group: int, softcap: float | None) -> Library:
    """Returns the library for a model's heads, `group` of which share a key head.

    FlashAttention 3 where its package is installed and this build of PyTorch takes it, else what PyTorch has in itself. Arguments
    changed from release to release, so they are looked up, and a build that lacks one is not called.

    Raises:
        NoLibraryError: None does.
    """
    if softcap is not None:
        raise NoLibraryError("scores have a softcap")
    if dtype not in _DTYPES:
        raise NoLibraryError(f"the model is {dtype}")
    try:
        varlen = importlib.import_module(_MODULE).varlen_attn
    except (ImportError, AttributeError) as error:
        raise NoLibraryError(f"torch {torch.__version__} has no {_MODULE}.varlen_attn") from error
    known = inspect.signature(varlen).parameters
    options: dict[str, Any] = {"scale": scale}
    if group > 1:
        options["enable_gqa"] = True
    if missing := [name for name in (*_ARGUMENTS, *options) if name not in known]:
        raise NoLibraryError(f"varlen_attn of torch {torch.__version__} has no argument {', '.join(missing)}")
    if "num_splits" in known and (name := _flash_3()):
        return Library(name, varlen, {**options, "num_splits": 1})  # a row's bits are its own then
    return Library("FlashAttention 2 of torch", varlen, options)


def _flash_3() -> str | None:
    """Makes PyTorch take FlashAttention 3, in the whole process, if it is installed; returns its name, or None."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None or importlib.util.find_spec(_FLASH_3) is None:
        return None
    try:
        activate("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        _log.warning("FlashAttention 3 is installed, and torch does not take it", extra={"reason": str(error)})
        return None
    return "FlashAttention 3"
