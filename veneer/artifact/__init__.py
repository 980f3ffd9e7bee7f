"""Adapter files: one parser for publish, load and the offline check, so that what is accepted can be loaded.

`check` reads `adapter_config.json` and `adapter_model.safetensors` in PEFT's format against the description of a base model.
Either it raises one `ArtifactError` that lists every fault, or it gives an `Artifact` that knows where each A and B lies and
how it is scaled. `describe_base` makes the description from a model folder. Needs numpy and the standard library only; nothing
is ever unpickled.
"""

from __future__ import annotations

from veneer.artifact.artifact import Artifact, Vectors, check
from veneer.artifact.base_model import describe_base, read_eos_ids
from veneer.artifact.base_weights import BaseWeights
from veneer.artifact.description import BaseDescription, EdgeDigest, TargetModule
from veneer.artifact.digest import version_digest
from veneer.artifact.faults import ArtifactError
from veneer.artifact.header import TensorRef
from veneer.artifact.hub import folder_name
from veneer.artifact.limits import Limits
from veneer.artifact.pairs import Bias, Pair
from veneer.artifact.report import LimitUse, ModuleReport, Report

__all__ = [
    "Artifact",
    "ArtifactError",
    "BaseDescription",
    "BaseWeights",
    "Bias",
    "EdgeDigest",
    "LimitUse",
    "Limits",
    "ModuleReport",
    "Pair",
    "Report",
    "TargetModule",
    "TensorRef",
    "Vectors",
    "check",
    "describe_base",
    "folder_name",
    "read_eos_ids",
    "version_digest",
]
