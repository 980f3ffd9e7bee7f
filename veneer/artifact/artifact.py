"""The check of an adapter as a whole, and the checked adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from veneer.artifact.config import WHERE, Config, read_config
from veneer.artifact.copies import check_copies
from veneer.artifact.description import BaseDescription
from veneer.artifact.faults import Faults, quote
from veneer.artifact.header import DTYPE_BYTES, FLOAT_DTYPES, HeaderLimits, TensorRef, read_header
from veneer.artifact.limits import Limits
from veneer.artifact.pairs import WEIGHTS, Bias, Pair, pair_up
from veneer.artifact.report import Findings, Report, base_match, make_report, measure_norms
from veneer.artifact.source import Source, opened
from veneer.artifact.values import CHUNK_ELEMENTS, Statistics, measure, measure_run, read_matrix
from veneer.errors import DataLossError

_DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Vectors:
    """What an adapter has beside its pairs: by (layer, slice), float32 [out_features] each.

    Attributes:
        magnitudes: Of DoRA.
        lora_biases: Added to B A x, before the scaling.
        biases: In place of the base's own.
    """

    magnitudes: Mapping[tuple[int, int], npt.NDArray[np.float32]]
    lora_biases: Mapping[tuple[int, int], npt.NDArray[np.float32]]
    biases: Mapping[tuple[int, int], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Artifact:
    """An adapter that passed the check. Holds places in the file, no weights.

    Attributes:
        pairs: Every pair of the file, by layer, then slice.
        dtype: Element type in the file.
        report: What the check found.
        base_name: Name of the base in the configuration, empty when not given.
        weights_bytes: Size of the weights file that the places refer to.
        biases: Every trained bias of the file, likewise.
    """

    pairs: tuple[Pair, ...]
    dtype: str
    report: Report
    base_name: str
    weights_bytes: int
    biases: tuple[Bias, ...] = ()

    def read(self, weights: BinaryIO | Path, *, keep: str = "") -> Iterator[tuple[Pair, npt.NDArray[Any], npt.NDArray[Any]]]:
        """Reads A and B, pair by pair.

        Args:
            weights: The very file that was checked; the caller has compared its digest.
            keep: Element type of the file that is left as it is, `BF16` as the uint16 of its bits, unless the pair has a
                magnitude, whose gain is computed of A and B.

        Yields:
            Each pair of `pairs` once and in order, with A `[rank, in]` and B `[out, rank]` widened exactly to float32, or kept.

        Raises:
            DataLossError: The file has another size, or ends too early.
        """
        with self._checked(weights) as source:
            for pair in self.pairs:
                kept = keep if pair.magnitude is None else ""
                yield pair, read_matrix(source, pair.a, keep=kept), read_matrix(source, pair.b, keep=kept)

    def read_vectors(self, weights: BinaryIO | Path) -> Vectors:
        """Reads magnitudes and biases.

        Raises:
            DataLossError: The file has another size, or ends too early.
        """
        with self._checked(weights) as source:
            return Vectors(
                {(one.layer, one.slice): read_matrix(source, one.magnitude) for one in self.pairs if one.magnitude is not None},
                {(one.layer, one.slice): read_matrix(source, one.lora_bias) for one in self.pairs if one.lora_bias is not None},
                {(one.layer, one.slice): read_matrix(source, one.ref) for one in self.biases},
            )

    @contextmanager
    def _checked(self, weights: BinaryIO | Path) -> Iterator[Source]:
        with opened(weights) as source:
            if source.size_bytes != self.weights_bytes:
                raise DataLossError(
                    f"{WEIGHTS} has {source.size_bytes} bytes; the file that was checked had {self.weights_bytes}"
                )
            yield source


def check(
    config: bytes,
    weights: BinaryIO | Path,
    base: BaseDescription,
    limits: Limits = _DEFAULT_LIMITS,
    *,
    norms: bool = False,
    compares_copies: bool = True,
) -> Artifact:
    """Checks an adapter against a base. What is accepted can be loaded, and every pair in the file is applied.

    Args:
        config: Bytes of `adapter_config.json`.
        weights: `adapter_model.safetensors`, open for reading or by path; each tensor is read once, in parts.
        base: The base that it was fine-tuned from.
        limits: What is allowed.
        compares_copies: Compare copies of the base's embedding and head with the base. Nothing is applied of them, so that a node
            need not do again what publish did with the same bytes.
        norms: Put the norms of what is added to the base into the report too: every pair is read once more for it.

    Raises:
        ArtifactError: Something is wrong; every fault is listed.
    """
    faults = Faults(limits.max_faults)
    settings = read_config(config, limits=limits, faults=faults)
    if isinstance(weights, Path) and not weights.is_file():
        faults.add(WEIGHTS, "is missing, or no regular file")
        faults.raise_if_any()
    with opened(weights) as source:
        tensors = _read_tensors(source, limits=limits, faults=faults)
        if settings is None:
            faults.raise_if_any()
            raise AssertionError("a configuration that cannot be read is a fault")
        _check_invocation(settings.invocation_tokens, base, faults=faults)
        updates = pair_up(tensors, settings, base, limits=limits, faults=faults)
        copies = {tensor.name for _, tensor in updates.copies}
        equal = check_copies(source, updates.copies, base, faults=faults) if compares_copies else []
        applied = [tensor for tensor in tensors if tensor.name not in copies]
        statistics = _measure(source, applied, limits=limits, faults=faults)
        faults.raise_if_any()
        _warn(settings, base, updates.pairs, statistics)
        settings.warnings.extend(
            f"{quote(name)} is a copy of the base's own weights, equal to them; it adds nothing" for name in equal
        )
        found = Findings(
            settings=settings,
            config_bytes=len(config),
            tensors=tensors,
            weights_bytes=source.size_bytes,
            pairs=updates.pairs,
            statistics=statistics,
            norms=measure_norms(source, updates.pairs, statistics) if norms else {},
        )
    report = make_report(found, base, limits)
    return Artifact(
        pairs=updates.pairs,
        dtype=report.dtype,
        report=report,
        base_name=settings.base_name,
        weights_bytes=found.weights_bytes,
        biases=updates.biases,
    )


def _check_invocation(tokens: Sequence[int], base: BaseDescription, *, faults: Faults) -> None:
    for place, token in enumerate(tokens):
        if token >= base.vocab_size:
            faults.add(
                f"{WHERE}: alora_invocation_tokens[{place}]", f"{token} is not below the vocabulary's size, {base.vocab_size}"
            )


def _read_tensors(source: Source, *, limits: Limits, faults: Faults) -> list[TensorRef]:
    if source.size_bytes > limits.max_weights_bytes:
        faults.add(WEIGHTS, f"has {source.size_bytes} bytes; at most {limits.max_weights_bytes} are allowed")
        return []
    header_limits = HeaderLimits(
        max_header_bytes=limits.max_header_bytes,
        max_tensors=limits.max_tensors,
        max_name_chars=limits.max_name_chars,
        max_dimension=limits.max_dimension,
        dtypes=FLOAT_DTYPES,
    )
    return read_header(source, WEIGHTS, limits=header_limits, faults=faults)


def _measure(source: Source, tensors: Sequence[TensorRef], *, limits: Limits, faults: Faults) -> dict[str, Statistics]:
    """Looks at the numbers of all tensors that lie inside the file, however wrong the rest of it may be."""
    statistics: dict[str, Statistics] = {}
    for run in _runs(source, tensors):
        found_of_run = measure_run(source, run) if len(run) > 1 else [measure(source, run[0])]
        statistics |= {tensor.name: found for tensor, found in zip(run, found_of_run, strict=True)}
    for name, found in statistics.items():
        field = f"{WEIGHTS}: {quote(name)}"
        if found.num_not_finite:
            faults.add(field, f"has {found.num_not_finite} elements that are NaN or infinite")
        if found.num_overflowing:
            faults.add(field, f"has {found.num_overflowing} elements that become infinite in bfloat16")
        if found.max_abs > limits.max_abs:
            faults.add(field, f"has an element of magnitude {found.max_abs:g}; at most {limits.max_abs:g} is allowed")
    return statistics


def _runs(source: Source, tensors: Sequence[TensorRef]) -> Iterator[list[TensorRef]]:
    """Yields the tensors inside the file, those together that follow one another and are few elements."""
    run: list[TensorRef] = []
    run_bytes = 0
    budget = source.size_bytes  # overlapping tensors must not make the work larger than the file
    for tensor in tensors:
        budget -= tensor.size_bytes
        if budget < 0 or tensor.offset + tensor.size_bytes > source.size_bytes:
            continue
        follows = run and tensor.dtype == run[0].dtype and tensor.offset == run[-1].offset + run[-1].size_bytes
        if run and not (follows and run_bytes + tensor.size_bytes <= CHUNK_ELEMENTS * DTYPE_BYTES[tensor.dtype]):
            yield run
            run, run_bytes = [], 0
        run.append(tensor)
        run_bytes += tensor.size_bytes
    if run:
        yield run


def _warn(config: Config, base: BaseDescription, pairs: Sequence[Pair], statistics: Mapping[str, Statistics]) -> None:
    if base_match(config.base_name, base) == "OTHER_NAME":
        config.warnings.append(f"{WHERE} names the base {quote(config.base_name)}; it is served on {quote(base.name)}")
    for part, refs in (("A", [pair.a for pair in pairs]), ("B", [pair.b for pair in pairs])):
        if all(statistics[ref.name].max_abs == 0.0 for ref in refs):
            config.warnings.append(f"every {part} is zero: the adapter has no effect")
    if any(pair.scaling < 0 for pair in pairs):
        config.warnings.append("alpha is negative: the adapter works against what it was trained for")
    dtypes = sorted({ref.dtype for pair in pairs for ref in (pair.a, pair.b)})
    if len(dtypes) > 1:
        config.warnings.append(f"tensors have several element types: {', '.join(dtypes)}")
