"""Deltas put together are the text of all ids; no stop string, and no part of a character, ever goes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dataplane.frontend.detokenizer import Detokenizer, StopStrings
from dataplane.frontend.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["byte_level_path", "byte_fallback_path"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    path: Path = request.getfixturevalue(request.param)
    return Tokenizer(path)


def deltas_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.pieces)
    return [*(detokenizer.add(id_) for id_ in ids), detokenizer.finish()]


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The tokenizer's own decoding, without bytes at its end that are no character."""
    if not tokenizer.pieces.byte_ids:
        return tokenizer.decode(ids).rstrip("\ufffd")
    cuts = (tokenizer.decode(ids[:cut]) for cut in range(len(ids), -1, -1))
    return next(text for text in cuts if not text.endswith("\ufffd"))


@given(text=st.text())
@example(text="👩‍👩‍👧 e\u0301 한국어 \U0001f3f3\ufe0f\u200d\U0001f308")
@example(text="   leading spaces")
@example(text="<tool call> and <|im_end|> inside")
def test_the_deltas_of_any_text_are_its_decoding(tokenizer: Tokenizer, text: str) -> None:
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    assert "".join(deltas_of(tokenizer, ids)) == tokenizer.decode(ids)


@given(data=st.data())
def test_the_deltas_of_any_ids_are_their_decoding(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(deltas_of(tokenizer, ids)) == text_of(tokenizer, ids)


@given(data=st.data())
def test_the_deltas_of_broken_characters_are_their_decoding(tokenizer: Tokenizer, data: st.DataObject) -> None:
    names = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in range(256)]
    byte_ids = [id_ for id_ in names if id_ is not None]
    if not byte_ids:
        byte_ids = [id_ for id_, raw in enumerate(tokenizer.pieces.raw) if len(raw) == 1 and raw[0] >= 0x80]
    assert byte_ids
    ids = data.draw(st.lists(st.sampled_from([*byte_ids, tokenizer.vocab_size - 1]), max_size=16))
    assert "".join(deltas_of(tokenizer, ids)) == text_of(tokenizer, ids)


MANY_BYTES = st.text(st.characters(min_codepoint=0x80, exclude_categories=["Cs"]) | st.sampled_from("ab é你👩\u200d\ufffd"))


@given(text=MANY_BYTES, data=st.data())
@example(text="é👩‍👩‍👧你\ufffd", data=None)
def test_wherever_the_ids_end_the_text_ends_before_a_character_that_is_not_whole(
    tokenizer: Tokenizer, text: str, data: st.DataObject | None
) -> None:
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    whole = tokenizer.decode(ids)
    cuts = range(len(ids) + 1) if data is None else [data.draw(st.integers(0, len(ids)))]
    for cut in cuts:
        sent = "".join(deltas_of(tokenizer, ids[:cut]))
        assert whole.startswith(sent)
        left = whole[len(sent) :]
        is_kept_back = left[:1] not in ("", "\ufffd") and tokenizer.decode(ids[:cut]).startswith(sent + left[0])
        assert not is_kept_back  # what is whole


def test_bytes_that_are_no_character_are_told_once_a_character_follows(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a", add_special_tokens=False)[-1]
    broken = [id_ for id_ in tokenizer.encode("👩", add_special_tokens=False)[:-1] if tokenizer.pieces.raw[id_] != b" "]
    detokenizer = Detokenizer(tokenizer.pieces)
    assert [detokenizer.add(id_) for id_ in broken] == [""] * len(broken)
    assert detokenizer.add(a) == tokenizer.decode([*broken, a])
    assert [detokenizer.add(id_) for id_ in broken] == [""] * len(broken)
    assert detokenizer.finish() == ""


def test_a_replacement_character_that_was_generated_is_text(tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode("a\ufffd", add_special_tokens=False))
    assert "".join(deltas_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_special_token_inside_a_character_does_not_break_it(tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode("👩", add_special_tokens=False))
    special = next(id_ for id_ in sorted(tokenizer.pieces.skipped))
    assert len(ids) > 1
    broken = [*ids[:-1], special, ids[-1]]
    assert "".join(deltas_of(tokenizer, broken)) == tokenizer.decode(broken) == tokenizer.decode(ids)


@given(text=st.text(alphabet="aé你👩\u200d", max_size=20))
def test_no_delta_holds_a_part_of_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    assert not any("\ufffd" in delta for delta in deltas_of(tokenizer, ids))


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert deltas_of(tokenizer, [tokenizer.vocab_size + 5]) == ["", ""]


def cut(pieces: list[str], stops: list[str]) -> tuple[str, bool, list[str]]:
    finder = StopStrings(stops)
    sent = []
    for piece in pieces:
        sent.append(finder.add(piece))
        if finder.found:
            return "".join(sent), True, sent
    return "".join([*sent, finder.finish()]), False, sent


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "found"),
    [
        (["one E", "ND two"], ["END"], "one ", True),
        (["one E", "N two"], ["END"], "one EN two", False),
        (["a", "a", "b"], ["ab"], "a", True),
        (["aaab"], ["aab"], "a", True),
        (["abc"], ["bc", "c"], "a", True),
        (["x", "y"], ["xyz", "y"], "x", True),
        (["\n", "\n"], ["\n\n"], "", True),
        (["text"], [], "text", False),
    ],
)
def test_a_stop_string_is_found_across_pieces(pieces: list[str], stops: list[str], text: str, found: bool) -> None:
    assert cut(pieces, stops)[:2] == (text, found)


def first_stop(text: str, stops: list[str], *, after: int = 0) -> int | None:
    """Where the text must be cut: the stop string that ends first after a place, the longest of those that end there."""
    for end in range(after + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    place = first_stop(text, stops)
    assert cut(pieces, stops)[:2] == (text[:place], place is not None)


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
    num_early=st.integers(0, 8),
)
@example(pieces=["xE", "ND"], stops=["END"], num_early=1)
@example(pieces=["ab", "c", "d"], stops=["ab", "abcd"], num_early=2)
@example(pieces=["aa", "a"], stops=["aa"], num_early=1)
def test_a_stop_string_counts_where_it_ends(pieces: list[str], stops: list[str], num_early: int) -> None:
    finder, sent = StopStrings(stops), ""
    for place, piece in enumerate(pieces):
        sent += finder.add(piece, counts=place >= num_early)
    sent += finder.finish()
    text = "".join(pieces)
    place_of_stop = first_stop(text, stops, after=len("".join(pieces[:num_early])))
    assert (sent, finder.found) == (text[:place_of_stop], place_of_stop is not None)


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_more_is_held_back_than_could_be_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    finder = StopStrings(stops)
    seen = sent = ""
    for piece in pieces:
        seen += piece
        sent += finder.add(piece)
        if finder.found:
            return
        held = seen[len(sent) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        longer = [seen[-size:] for size in range(len(held) + 1, len(seen) + 1)]
        assert not any(stop.startswith(end) and stop != end for stop in stops for end in longer)
