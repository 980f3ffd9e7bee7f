"""Reads a Hugging Face folder into a `Decoder`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dataplane.model.architecture import Architecture
from dataplane.model.decoder import Decoder, norm_names, weight_shapes
from dataplane.model.layers import Rotary
from dataplane.model.linear import Linear
from dataplane.model.native_stack import NativeStack, takes
from dataplane.model.pieces import NativePieces, Pieces, TorchPieces
from dataplane.model.stack import DecoderLayer, PieceStack, Stack
from veneer.errors import InvalidArgumentError, Violation

_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Names that settings use for the dtypes a model can run in."""


def load_decoder(
    model_dir: Path,
    form: Architecture,
    *,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
    pieces: Pieces | None = None,
) -> Decoder:
    """Loads the weights, one layer at a time, fused and packed.

    Raises:
        InvalidArgumentError: Tensors are missing, unknown or of another shape (every fault is listed), or a file is damaged.
    """
    files = _Files(model_dir, form)
    names = norm_names(form)
    pieces = pieces or TorchPieces()

    def tensor(name: str) -> Tensor:
        return files.read(name).to(device=device, dtype=dtype)

    def norm(name: str) -> Tensor:
        if not form.norm_offset:
            return tensor(f"{name}.weight")
        return (files.read(f"{name}.weight").float() + form.norm_offset).to(device)

    def product(prefix: str, site: str) -> Linear:
        parts = [part for part in form.projections if part.site == site]
        weight = torch.cat([tensor(f"{prefix}{part.path}.weight") for part in parts])
        biased = all(part.bias for part in parts)
        return pieces.pack(weight, torch.cat([tensor(f"{prefix}{part.path}.bias") for part in parts]) if biased else None)

    def heads_norm(prefix: str) -> Tensor:
        q, k = norm(f"{prefix}self_attn.q_norm"), norm(f"{prefix}self_attn.k_norm")
        return torch.cat([q.expand(form.num_heads, -1), k.expand(form.num_kv_heads, -1)])

    layers = []
    for i in range(form.num_layers):
        prefix = f"model.layers.{i}."
        layers.append(
            DecoderLayer(
                attention_norm=norm(prefix + names.attention),
                qkv=product(prefix, "qkv"),
                qk_norm=heads_norm(prefix) if form.qk_norm else None,
                o=product(prefix, "o"),
                post_attention_norm=None if names.post_attention is None else norm(prefix + names.post_attention),
                mlp_norm=norm(prefix + names.mlp),
                gate_up=product(prefix, "gate_up"),
                down=product(prefix, "down"),
                post_mlp_norm=None if names.post_mlp is None else norm(prefix + names.post_mlp),
            )
        )
    embedding = tensor("model.embed_tokens.weight")
    ropes = {layer.rope for layer in form.layers if layer.rope is not None}
    rotaries = {rope: Rotary(rope, max_context=max_context, dtype=dtype, device=device) for rope in ropes}

    def stack() -> Stack:
        if isinstance(pieces, NativePieces) and takes(layers):
            return NativeStack(form, tuple(layers), rotaries, native=pieces.native, dtype=dtype)
        return PieceStack(form, tuple(layers), rotaries, pieces)

    return Decoder(
        form=form,
        embedding=embedding,
        embedding_scale=torch.tensor(form.embedding_scale).to(dtype).item(),
        stack=stack(),
        norm=norm("model.norm"),
        head=pieces.pack(embedding if form.tied else tensor("lm_head.weight")),
        pieces=pieces,
    )


class _Files:
    """The safetensors files of a folder, opened once; names and shapes are checked before a byte of data is read."""

    def __init__(self, model_dir: Path, form: Architecture) -> None:
        expected = weight_shapes(form)
        faults = []
        found: dict[str, tuple[int, ...]] = {}
        self._home = {}
        for path in _weight_files(model_dir):
            try:
                opened = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InvalidArgumentError.of([Violation(path.name, f"cannot be read: {error}")]) from error
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if name in found:
                    faults.append(Violation(name, f"is in {path.name} and in another file"))
                found[name] = tuple(opened.get_slice(name).get_shape())
                self._home[name] = opened
        faults += [
            Violation(name, f"must have shape {shape}, is missing") for name, shape in expected.items() if name not in found
        ]
        for name, shape in found.items():
            if name.endswith(_IGNORED_SUFFIX) or (form.tied and name == "lm_head.weight"):
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


def _weight_files(model_dir: Path) -> list[Path]:
    """Returns the files that the index names; without an index, all.

    Some folders hold the weights a second time, in another form and under other names, which the index leaves out.
    """
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        try:
            names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError.of([Violation(index.name, f"cannot be read: {error!r}")]) from error
        return [model_dir / name for name in sorted(names)]
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        raise InvalidArgumentError.of([Violation(str(model_dir), "holds no *.safetensors file")])
    return paths
