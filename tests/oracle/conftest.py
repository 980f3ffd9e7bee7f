"""Two models with adapters of every rank: a tiny random Llama, and SmolLM2."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.fixtures.oracle import MixedBatches, Oracle, Setting, save_peft_adapter

ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _adapters(base: torch.nn.Module, folder: Path, *, strength: float, num_layers: int) -> dict[str, Path]:
    """Adapters of ranks 1, 3, 8, 16 and 64, on one to seven modules, on some or all layers."""

    def save(name: str, seed: int, factor: float, **config: object) -> Path:
        return save_peft_adapter(base, folder / name, seed=seed, strength=factor * strength, **config)  # type: ignore[arg-type]

    return {
        "one-module": save("one-module", 1, 4.0, r=1, lora_alpha=2, target_modules=["v_proj"]),
        "two-modules": save("two-modules", 2, 2.0, r=3, lora_alpha=6.5, target_modules=["q_proj", "v_proj"]),
        "rslora": save(
            "rslora", 3, 1.0, r=8, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
        ),
        "patterns": save(
            "patterns",
            4,
            1.0,
            r=16,
            lora_alpha=16,
            target_modules=ALL_MODULES,
            rank_pattern={"down_proj": 5, "layers.1.self_attn.q_proj": 11},
            alpha_pattern={"up_proj": 40},
        ),
        "some-layers": save(
            "some-layers", 5, 1.5, r=64, lora_alpha=64, target_modules=ALL_MODULES, layers=list(range(1, num_layers, 2))
        ),
    }


def _tiny(folder: Path) -> torch.nn.Module:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    Tokenizer(WordLevel({f"t{index}": index for index in range(199)}, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return model  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A random Llama with untied embeddings, grouped-query attention and widths that are no multiple of 64."""
    folder = tmp_path_factory.mktemp("tiny")
    model = folder / "model"
    adapters = _adapters(_tiny(model), folder, strength=0.5, num_layers=4)
    return Setting(model, adapters, 199, MixedBatches(model, adapters), Oracle(model, adapters), tolerance=2e-4)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """SmolLM2-135M-Instruct as the demonstration prepares it, computed in float32."""
    from transformers import AutoModelForCausalLM

    from demo.prepare import prepare

    model = prepare()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapters = _adapters(base, tmp_path_factory.mktemp("smollm2"), strength=0.5, num_layers=30)
    del base
    return Setting(
        model, adapters, 49152, MixedBatches(model, adapters, arena_bytes=256 << 20), Oracle(model, adapters), tolerance=2e-3
    )


@pytest.fixture(scope="session")
def tiny_native(tiny: Setting) -> Setting:
    """The same, our side in the native CPU form."""
    return dataclasses.replace(tiny, ours=MixedBatches(tiny.model, tiny.adapters, cpu_form="native"))


@pytest.fixture(scope="session")
def smollm2_native(smollm2: Setting) -> Setting:
    """The same, our side in the native CPU form."""
    ours = MixedBatches(smollm2.model, smollm2.adapters, arena_bytes=256 << 20, cpu_form="native")
    return dataclasses.replace(smollm2, ours=ours)
