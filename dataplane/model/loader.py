"""Reads a Hugging Face folder into a `Llama`."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dataplane.model.config import LlamaConfig
from dataplane.model.layers import Rotary
from dataplane.model.llama import Llama, LlamaLayer, weight_shapes
from dataplane.model.pieces import Pieces, TorchPieces
from veneer.errors import InvalidArgumentError, Violation

_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Names that settings use for the dtypes a model can run in."""


def load_llama(
    model_dir: Path,
    config: LlamaConfig,
    *,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
    pieces: Pieces | None = None,
) -> Llama:
    """Loads the weights, one layer at a time, fused and packed.

    Raises:
        InvalidArgumentError: Tensors are missing, unknown or of another shape (every fault is listed), or a file is damaged.
    """
    files = _Files(model_dir, config)
    pieces = pieces or TorchPieces()

    def tensor(name: str) -> Tensor:
        return files.read(name).to(device=device, dtype=dtype)

    def fused(prefix: str, *names: str) -> Tensor:
        return torch.cat([tensor(f"{prefix}{name}.weight") for name in names])

    layers = []
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        layers.append(
            LlamaLayer(
                attention_norm=tensor(prefix + "input_layernorm.weight"),
                qkv=pieces.pack(fused(prefix + "self_attn.", "q_proj", "k_proj", "v_proj")),
                o=pieces.pack(tensor(prefix + "self_attn.o_proj.weight")),
                mlp_norm=tensor(prefix + "post_attention_layernorm.weight"),
                gate_up=pieces.pack(fused(prefix + "mlp.", "gate_proj", "up_proj")),
                down=pieces.pack(tensor(prefix + "mlp.down_proj.weight")),
            )
        )
    embedding = tensor("model.embed_tokens.weight")
    return Llama(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        norm=tensor("model.norm.weight"),
        head=pieces.pack(embedding if config.tied else tensor("lm_head.weight")),
        rotary=Rotary(config, max_context=max_context, dtype=dtype, device=device),
        pieces=pieces,
    )


class _Files:
    """The safetensors files of a folder, opened once; names and shapes are checked before a byte of data is read."""

    def __init__(self, model_dir: Path, config: LlamaConfig) -> None:
        paths = sorted(model_dir.glob("*.safetensors"))
        if not paths:
            raise InvalidArgumentError.of([Violation(str(model_dir), "holds no *.safetensors file")])
        expected = weight_shapes(config)
        found: dict[str, tuple[int, ...]] = {}
        self._home = {}
        for path in paths:
            try:
                opened = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InvalidArgumentError.of([Violation(path.name, f"cannot be read: {error}")]) from error
            for name in opened.keys():  # noqa: SIM118 - not a dict
                found[name] = tuple(opened.get_slice(name).get_shape())
                self._home[name] = opened
        faults = [
            Violation(name, f"must have shape {shape}, is missing") for name, shape in expected.items() if name not in found
        ]
        for name, shape in found.items():
            if name.endswith(_IGNORED_SUFFIX) or (config.tied and name == "lm_head.weight"):
                continue
            if name not in expected:
                faults.append(Violation(name, "is not a tensor of this model"))
            elif shape != expected[name]:
                faults.append(Violation(name, f"must have shape {expected[name]}, has {shape}"))
        if faults:
            raise InvalidArgumentError.of(faults)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._home[name].get_tensor(name)
        return tensor
