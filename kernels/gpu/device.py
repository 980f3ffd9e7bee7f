"""What a device can do, asked once when the kernels are set up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton import knobs

from veneer.errors import FailedPreconditionError

LEAST_CAPABILITY = (8, 0)
_DEPENDENT_LAUNCH = (9, 0)


class UnsupportedDeviceError(FailedPreconditionError):
    """The Triton kernels do not run on this device."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Facts that launches depend on.

    Attributes:
        name: For the log and the printed plan.
        num_multiprocessors: Multiprocessors; grids are sized by them.
        has_dependent_launch: Whether a kernel may be launched before the one in front of it ends.
        is_interpreted: Whether Triton's interpreter stands in for a device.
    """

    name: str
    num_multiprocessors: int
    has_dependent_launch: bool
    is_interpreted: bool = False


def probe(device: str | torch.device) -> Gpu:
    """Returns what a device can do.

    Raises:
        UnsupportedDeviceError: It is no CUDA device of compute capability 8.0 or more, and no interpreter stands in for one.
    """
    device = torch.device(device)
    if device.type == "cpu" and knobs.runtime.interpret:
        return Gpu("Triton's interpreter", num_multiprocessors=4, has_dependent_launch=False, is_interpreted=True)
    if device.type != "cuda":
        raise UnsupportedDeviceError(f"the Triton kernels run on CUDA devices, not on {device}")
    if not torch.cuda.is_available():
        raise UnsupportedDeviceError("there is no CUDA device, or this build of torch has no CUDA")
    facts = torch.cuda.get_device_properties(device)
    if (facts.major, facts.minor) < LEAST_CAPABILITY:
        raise UnsupportedDeviceError(f"{facts.name} has compute capability {facts.major}.{facts.minor}; 8.0 is needed")
    return Gpu(facts.name, facts.multi_processor_count, (facts.major, facts.minor) >= _DEPENDENT_LAUNCH)
