"""Only tokenizers whose text can be streamed exactly are served."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from dataplane.frontend.tokenizer import HiddenControls, Tokenizer, TokenizerError, reads_disguises
from tests.dataplane.frontend.conftest import train_byte_fallback, train_byte_level

_read = functools.cache(Tokenizer)


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


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|", "|>", "im_end", "<", "a"]), max_size=9).map("".join))
def test_the_longest_special_token_in_a_text_is_found(byte_level_path: Path, text: str) -> None:
    tokenizer = _read(byte_level_path)
    inside = [token for token in tokenizer.special_tokens if token in text]
    assert tokenizer.special_token_in(text) == max(inside, key=len, default="")


def test_special_tokens_are_recognised_but_have_no_text(byte_level_path: Path) -> None:
    tokenizer = Tokenizer(byte_level_path)
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "hi"


def _merged() -> RawTokenizer:
    """A BPE in the manner of SentencePiece whose merges make the text of a control token one token of the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", "▁", *"<>/sabc", "<s", "</", "</s", "ab", "▁ab"]
    vocab = {piece: place for place, piece in enumerate(pieces)} | {f"<0x{byte:02X}>": 100 + byte for byte in range(256)}
    merges = [("<", "s"), ("<s", ">"), ("<", "/"), ("</", "s"), ("</s", ">"), ("a", "b"), ("▁", "ab")]
    tokenizer = RawTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def _unigram() -> RawTokenizer:
    pieces = ["<unk>", "<s>", "</s>", "▁", *"<>/sabcd", "ab", "▁a", "s>"]
    tokenizer = RawTokenizer(models.Unigram([(piece, -float(place)) for place, piece in enumerate(pieces)], unk_id=0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(["<unk>", "<s>", AddedToken("</s>", normalized=True, lstrip=True)])
    return tokenizer


def _with_flags() -> RawTokenizer:
    tokenizer = train_byte_level()
    tokenizer.add_special_tokens([AddedToken("<s>", rstrip=True), AddedToken("</s>", lstrip=True, rstrip=True)])
    tokenizer.add_tokens([AddedToken("    ", normalized=False), AddedToken("<unk>", normalized=True)])
    return tokenizer


_KINDS = {
    "byte-level": (train_byte_level, ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool call>")),
    "byte-level with flags": (_with_flags, ("<|im_start|>", "<s>", "</s>", "<unk>")),
    "byte fallback": (train_byte_fallback, ("<unk>", "<s>", "</s>")),
    "merges make the tokens": (_merged, ("<unk>", "<s>", "</s>")),
    "unigram": (_unigram, ("<unk>", "<s>", "</s>")),
}
_PIECES = ["a", "ab", " ", "  ", "\n", "the", "<", ">", "/", "s", "é", "你", "\0", "S>", "Ⅷ", "<|", "|>"]


@pytest.mark.parametrize("kind", _KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_control_tokens_where_they_stand_give_the_ids_of_the_whole_text(kind: str, data: st.DataObject) -> None:
    make, controls = _KINDS[kind]
    tokenizer = make()
    text = "".join(data.draw(st.lists(st.sampled_from([*_PIECES, *controls]), max_size=12)))
    assume(not reads_disguises(tokenizer, controls) or text == text.lower())
    spans = [match.span() for match in re.finditer("|".join(map(re.escape, controls)), text)]
    assert HiddenControls(tokenizer, controls).encode(text, spans) == tuple(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", _KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_text_of_control_tokens_elsewhere_is_ordinary(kind: str, data: st.DataObject) -> None:
    make, controls = _KINDS[kind]
    tokenizer = make()
    first, last = (controls[place] for place in data.draw(st.tuples(*[st.integers(0, len(controls) - 1)] * 2)))
    content = "".join(data.draw(st.lists(st.sampled_from([*_PIECES, *controls]), max_size=12)))
    spans = [(0, len(first)), (len(first) + len(content), len(first) + len(content) + len(last))]
    ids = HiddenControls(tokenizer, controls).encode(first + content + last, spans)
    unknown = tokenizer.token_to_id("<unk>") if "fallback" not in kind and "level" not in kind else None
    special = [tokenizer.token_to_id(token) for token in controls]
    assert [ids[0], ids[-1]] == [tokenizer.token_to_id(first), tokenizer.token_to_id(last)] or "unigram" in kind
    assert sum(id_ in special and id_ != unknown for id_ in ids) == sum(
        token != "<unk>" or unknown is None for token in (first, last)
    )


def test_a_normalizer_that_makes_other_texts_alike_is_known() -> None:
    assert [kind for kind, (make, controls) in _KINDS.items() if reads_disguises(make(), controls)] == ["unigram"]
    tokenizer = train_byte_level()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken("[END]", normalized=False)])
    assert not reads_disguises(tokenizer, ["[END]"])
    tokenizer.add_special_tokens([AddedToken("[STOP]", normalized=True)])
    assert reads_disguises(tokenizer, ["[STOP]"])
