"""Small arrays on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns numbers as a tensor on the device; the host waits neither for the copy nor for what was queued before it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
