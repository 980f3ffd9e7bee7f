"""Both planes with a tiny random model, for figures about the control plane; and what makes seconds comparable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.models import write_random_llama
from benchmarks.random_adapters import write_adapter
from benchmarks.workload import AdapterKey
from veneer.artifact import BaseDescription, describe_base
from veneer.local.stack import LocalStack

TENANT = "bench"
TWO_MB_RANK = 29
"""Rank of an adapter on all modules of the tiny model that has 2 MB."""

_MIB = 1 << 20
_VOCAB = 512
_ROUNDS = 3_000_000


@contextmanager
def control_stack(folder: Path, *, chat_template: str | None = None, **settings: str | None) -> Iterator[LocalStack]:
    """The system with the tenant `bench`, at the settings of the product except for what a small machine cannot spare.

    Args:
        folder: Models and state go there.
        chat_template: Of the model; None: it has none.
        settings: Of the data plane.
    """
    model = folder / "tiny"
    model.mkdir(parents=True)
    write_random_llama(model, hidden=512, mlp=1024, heads=8, layers=4, vocab=_VOCAB)
    _byte_tokenizer().save(str(model / "tokenizer.json"))
    if chat_template is not None:
        (model / "chat_template.jinja").write_text(chat_template)
    known: dict[str, str | None] = {
        "num_threads": "1",
        "kv_bytes": str(32 * _MIB),
        "arena_bytes": str(256 * _MIB),
        "host_cache_bytes": str(1024 * _MIB),
        **settings,
    }
    with LocalStack(folder / "stack", model, data_settings=known) as stack:
        stack.add_tenant(TENANT)
        yield stack


def _byte_tokenizer() -> Tokenizer:
    """Every byte is a token; those after them are never written by a prompt."""
    words = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"filler{number}" for number in range(_VOCAB - len(words))]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def base_of(folder: Path) -> BaseDescription:
    """Description of the model that `control_stack` serves from the folder."""
    return describe_base(folder / "tiny")


def two_mb_adapter(folder: Path, base: BaseDescription, number: int) -> Path:
    """Writes an adapter of 2 MB, another for each number; returns its folder."""
    return write_adapter(folder, base, AdapterKey(number, TWO_MB_RANK, "all"))


def calibration_s() -> float:
    """Seconds that this machine takes now for a loop that is the same everywhere: read figures in seconds beside it."""
    start = time.perf_counter()
    total = 0
    for number in range(_ROUNDS):
        total += number & 7
    assert total
    return time.perf_counter() - start


def say_calibration() -> None:
    """Prints the calibration loop's time."""
    print(f"calibration: {_ROUNDS} rounds of an empty loop take {calibration_s():.3f} s", flush=True)
