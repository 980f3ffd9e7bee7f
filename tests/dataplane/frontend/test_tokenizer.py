"""Only tokenizers whose text can be streamed exactly are served."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from dataplane.frontend.tokenizer import Tokenizer, TokenizerError


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(path)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
def test_a_decoder_that_cannot_be_streamed_exactly_is_refused(tmp_path: Path, decoder: object) -> None:
    raw = RawTokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        raw.decoder = decoder
    path = tmp_path / "tokenizer.json"
    raw.save(str(path))
    with pytest.raises(TokenizerError, match="not supported"):
        Tokenizer(path)


def test_a_token_stands_for_a_bounded_text_where_none_is_dropped(byte_level_path: Path, byte_fallback_path: Path) -> None:
    tokenizer = Tokenizer(byte_level_path)
    assert tokenizer.max_token_bytes is not None
    for text in ("the quick brown fox " * 9, " " * 99, "<|endoftext|>" * 9, "<tool call>" * 9, "你好" * 9):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) * tokenizer.max_token_bytes >= len(text)
    assert Tokenizer(byte_fallback_path).max_token_bytes is None


def test_special_tokens_are_recognised_but_have_no_text(byte_level_path: Path) -> None:
    tokenizer = Tokenizer(byte_level_path)
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "hi"
