"""Random adapters as folders in PEFT's format, the one form that every contender reads."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.workload import MODULES, SEED, AdapterKey
from veneer.artifact import BaseDescription

_STRENGTH = 0.3
"""Size of what an adapter adds to a unit vector, per output: enough that other tokens are the likeliest."""


def kind_of(number: int) -> AdapterKey:
    """Returns an adapter of a mixed catalogue: three in ten on all modules of rank 8 to 16, the others on two of rank 4 to 16."""
    if number % 10 < 3:
        return AdapterKey(number, 8 + number // 10 % 9, "all")
    return AdapterKey(number, 4 + number // 10 % 13, "qv")


def block_bytes(base: BaseDescription, key: AdapterKey) -> tuple[int, ...]:
    """Returns the bytes of an adapter's blocks in an image, in bfloat16: A and B of a pair, each a multiple of 128."""
    modules = [module for module in base.modules if module.name in MODULES[key.modules]]
    sizes = [sum(-(-2 * key.rank * size // 128) * 128 for size in (part.in_features, part.out_features)) for part in modules]
    return tuple(sizes * base.num_layers)


def write_adapter(folder: Path, base: BaseDescription, key: AdapterKey) -> Path:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, in bfloat16, unless they lie there; returns their folder."""
    target = folder / key.name
    if target.exists():
        return target
    random = np.random.default_rng([SEED, zlib.crc32(key.name.encode())])
    tensors = {}
    names = MODULES[key.modules]
    for layer in range(base.num_layers):
        for module in base.modules:
            if module.name not in names:
                continue
            stem = f"base_model.model.{module.path.format(layer=layer)}"
            a = random.standard_normal((key.rank, module.in_features), dtype=np.float32) / module.in_features**0.5
            b = random.standard_normal((module.out_features, key.rank), dtype=np.float32) * _STRENGTH / key.rank**0.5
            tensors[f"{stem}.lora_A.weight"] = torch.from_numpy(a).bfloat16()
            tensors[f"{stem}.lora_B.weight"] = torch.from_numpy(b).bfloat16()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base.name, "inference_mode": True,
        "bias": "none", "r": key.rank, "lora_alpha": key.rank, "lora_dropout": 0.0, "target_modules": list(names),
    }  # fmt: skip
    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors")
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target
