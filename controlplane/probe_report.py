"""What became of a probe, as the catalogue keeps it beside a version; and how measures are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ProbeState = Literal["ASKED", "PASSED", "FAILED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeMeasures:
    """What a node measured; mirrors the message of this name."""

    fault: str = ""
    finite: bool = False
    num_prompts: int = 0
    num_tokens: int = 0
    max_difference: float = 0.0
    num_samples: int = 0
    max_error: float = 0.0
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What a data plane found when it ran a version; mirrors the message of this name.

    Attributes:
        state: How far it is.
        node: Identifier of the data plane; empty before one took it on.
        faults: Why it failed.
        warnings: Things worth a look that do not stop the version.
        num_prompts: Prompts that ran.
        num_tokens: Tokens whose probabilities were compared with the base's.
        max_difference: Largest difference of the logarithm of a token's probability from the base's.
        num_samples: Pairs whose product was compared with a float32 reference made of the stored files.
        max_error: Largest difference from it, as a part of the reference's norm.
        tolerance: What it may be.
        take_time_s: Unix time by the database at which the node took it on; 0: none has. Not part of the message.
    """

    state: ProbeState
    node: str = ""
    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    num_prompts: int = 0
    num_tokens: int = 0
    max_difference: float = 0.0
    num_samples: int = 0
    max_error: float = 0.0
    tolerance: float = 0.0
    take_time_s: float = 0.0

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any] | None) -> ProbeReport | None:
        """Reads what `dataclasses.asdict` gave after a way through JSON; None where no probe was asked for."""
        if fields is None:
            return None
        return cls(**{**fields, "faults": tuple(fields["faults"]), "warnings": tuple(fields["warnings"])})


def judge(measures: ProbeMeasures, *, node: str, max_norm: float | None) -> ProbeReport:
    """Says whether a version did well.

    Args:
        measures: What the node measured.
        node: Which one.
        max_norm: Largest norm of what the version adds to a weight of the base, where it is known: 0 adds nothing.
    """
    faults, warnings = [], []
    if measures.fault:
        faults.append(f"it could not be run: {measures.fault}")
    elif not measures.finite:
        faults.append("the model gave values that are not finite")
    else:
        if measures.num_samples and measures.max_error > measures.tolerance:
            faults.append(
                f"what the engine computes differs from the stored files by {measures.max_error:.3g} of their norm; "
                f"{measures.tolerance:g} is allowed"
            )
        if not measures.max_difference:
            reason = ", though its weights are not zero" if max_norm else ""
            warnings.append(f"on {measures.num_prompts} prompts it answers exactly as the base does{reason}")
        if not measures.num_samples:
            warnings.append("no pair could be compared with the stored files")
    return ProbeReport(
        state="FAILED" if faults else "PASSED",
        node=node,
        faults=tuple(faults),
        warnings=tuple(warnings),
        num_prompts=measures.num_prompts,
        num_tokens=measures.num_tokens,
        max_difference=measures.max_difference,
        num_samples=measures.num_samples,
        max_error=measures.max_error,
        tolerance=measures.tolerance,
    )
