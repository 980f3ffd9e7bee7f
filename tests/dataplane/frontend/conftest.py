"""Real tokenizers, trained on a few lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_TEXT = [
    "the quick brown fox jumps over the lazy dog and then it sleeps, until morning comes",
    "naïve café, größer, 你好世界, привет мир, 한국어, 👩‍👩‍👧 family",
    "def add(a, b):\n    return a + b\n",
]
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_byte_level() -> Tokenizer:
    """A byte-level BPE with special tokens, and one added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


def train_byte_fallback() -> Tokenizer:
    """A BPE in the manner of SentencePiece: a mark for spaces, `<0x..>` for bytes without a token."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz", "é", "你", "th", "the", "▁the"]:
        vocab[piece] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def byte_level_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte-level") / "tokenizer.json"
    train_byte_level().save(str(path))
    return path


@pytest.fixture(scope="session")
def byte_fallback_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte-fallback") / "tokenizer.json"
    train_byte_fallback().save(str(path))
    return path


@pytest.fixture
def model_dir(byte_level_path: Path, tmp_path: Path) -> Path:
    """What `Prompts` reads of a model folder."""
    (tmp_path / "tokenizer.json").write_bytes(byte_level_path.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT, "eos_token": "<|im_end|>"}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return tmp_path
