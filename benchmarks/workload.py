"""What every contender of a benchmark is given: the same prompts, and adapters of the same shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataplane.lora.image import ImagePair, build_image, write_image
from veneer.artifact import BaseDescription

SEED = 20_26


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch of requests that arrive together.

    Attributes:
        streams: Requests.
        prompt_tokens: Tokens of each prompt.
        output_tokens: Tokens that each generates.
        vocab_size: Ids are drawn below it.
        adapters: Distinct adapters, dealt out in turn; 0 is the base alone.
        rank: Rank of every adapter, on all seven modules.
    """

    streams: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int
    adapters: int = 0
    rank: int = 16

    def prompts(self) -> list[list[int]]:
        """Returns the token ids, the same on every call."""
        random = np.random.default_rng(SEED)
        ids: list[list[int]] = random.integers(0, self.vocab_size, (self.streams, self.prompt_tokens)).tolist()
        return ids


def adapter_name(index: int) -> str:
    """Returns the version digest that stands for a made adapter."""
    return f"{index:064x}"


def write_adapters(folder: Path, base: BaseDescription, *, count: int, rank: int, dtype: str) -> dict[str, Path]:
    """Writes images of random adapters on every module of every layer; returns version → path."""
    random = np.random.default_rng(SEED)
    paths = {}
    for index in range(count):
        pairs = (
            ImagePair(
                layer,
                position,
                1.0,
                random.standard_normal((rank, module.in_features), dtype=np.float32) * 0.01,
                random.standard_normal((module.out_features, rank), dtype=np.float32) * 0.01,
            )
            for layer in range(base.num_layers)
            for position, module in enumerate(base.modules)
        )
        version = adapter_name(index)
        image = build_image(
            pairs,
            version=version,
            base_digest=base.digest,
            dtype=dtype,
            num_layers=base.num_layers,
            num_slices=len(base.modules),
        )
        paths[version] = folder / f"{version}.image"
        write_image(paths[version], image)
    return paths
