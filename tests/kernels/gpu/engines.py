"""Whole engines on a tiny model with adapters: what they answer, form by form."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import save_file

import dataplane.engine.engine
from dataplane.engine.config import EngineConfig
from dataplane.engine.engine import Engine
from dataplane.engine.messages import Failed, Sampling, Stage, Submit, Tokens
from dataplane.engine.runner import edge_features, model_features
from dataplane.lora.image import ImagePair, build_image
from dataplane.lora.image_file import write_image
from dataplane.model.config import parse_config
from dataplane.model.decoder import weight_shapes

FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
PAGE = 2 * 16 * 16 * 4
"""Bytes of a page of 16 tokens."""
RANKS = {"a1": 1, "a5": 5, "a17": 17}


def write_world(folder):
    """Writes the model and an image of each version; returns the paths of the images."""
    (folder / "config.json").write_text(json.dumps(FIELDS))
    form = parse_config(FIELDS)
    generator = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in weight_shapes(form).items()}
    save_file(weights, folder / "model.safetensors")
    return write_images(folder, adapters(form))


def adapters(form):
    """Returns the pairs of each version."""
    features, numbers = model_features(form), np.random.default_rng(4)
    return {
        version: [
            ImagePair(
                layer,
                index,
                0.5,
                numbers.standard_normal((rank, features[index][0])).astype(np.float32) * np.float32(0.3),
                numbers.standard_normal((features[index][1], rank)).astype(np.float32) * np.float32(0.3),
            )
            for layer in range(form.num_layers)
            for index in range(len(features))
            if (index + rank) % 4
        ]
        for version, rank in RANKS.items()
    }


def edge_pairs(form, *, rank=3):
    """Returns pairs of a version on the embedding and the head alone."""
    numbers = np.random.default_rng(6)
    return [
        ImagePair(
            form.num_layers,
            index,
            0.5,
            numbers.standard_normal((rank, num_in)).astype(np.float32) * np.float32(0.3),
            numbers.standard_normal((num_out, rank)).astype(np.float32) * np.float32(0.3),
        )
        for index, (num_in, num_out) in enumerate(edge_features(form))
    ]


def write_images(folder, pairs, *, dtype="float32"):
    """Writes an image of each version; returns their paths."""
    form = parse_config(FIELDS)
    sizes = {"num_layers": form.num_layers, "num_slices": len(model_features(form))}
    paths = {version: folder / f"{version}.{dtype}" for version in pairs}
    for version, path in paths.items():
        write_image(path, build_image(pairs[version], version=version, base_digest="", dtype=dtype, **sizes))
    return paths


def config_of(folder, *, num_pages=40, **changes):
    """Settings for so many pages that can be handed out, in either form."""
    num_spare = 2 if changes.get("cpu_form") == "triton" else 1
    settings = {
        "model_dir": str(folder), "dtype": "float32", "num_threads": 1, "max_sequences": 4, "max_step_tokens": 16,
        "kv_bytes": (num_pages + num_spare) * PAGE, "arena_bytes": 1 << 17, "arena_unit_bytes": 4096, "max_slots": 4,
        "max_rank": 32, "max_step_rank_rows": 64,
    }  # fmt: skip
    return EngineConfig(**(settings | changes))


@dataclass
class Answers:
    """What an engine answered: tokens by request, and how its steps were."""

    tokens: dict
    failed: dict
    engine: Engine


def ask(name, prompt, version=None, *, max_tokens=6, **sampling):
    settings = Sampling(**({"max_tokens": max_tokens, "temperature": 0.0} | sampling))
    return Submit(request_id=name, tenant="t", prompt=tuple(prompt), sampling=settings, version=version)


def answer(config, paths, requests, *, prepare=lambda _engine: None):
    """Serves requests in the calling thread, turn by turn, and returns what came."""
    events = []
    engine = Engine(config, events.extend)
    prepare(engine)
    idle_s = dataplane.engine.engine._IDLE_S
    dataplane.engine.engine._IDLE_S = 0.01  # a turn without a step comes back
    try:
        for version, path in paths.items():
            engine.send(Stage(version, str(path)))
        while not all(engine._adapters.is_in_host(version) for version in paths):
            engine._turn()
        for request in requests:
            engine.send(request)
        tokens = {request.request_id: [] for request in requests}
        failed, ended = {}, set()
        while len(ended) < len(requests):
            engine._turn()
            for event in events:
                if isinstance(event, Failed):
                    failed[event.request_id] = event.status
                    ended.add(event.request_id)
                for delta in event.deltas() if isinstance(event, Tokens) else ():
                    tokens[delta.request_id] += delta.ids
                    if delta.finish is not None:
                        ended.add(delta.request_id)
            events.clear()
    finally:
        dataplane.engine.engine._IDLE_S = idle_s
        engine._grammars.stop()
        engine._adapters.stop()
    return Answers(tokens, failed, engine)
