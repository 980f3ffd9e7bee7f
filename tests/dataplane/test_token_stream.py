"""What waits for a reader is merged, bounded and complete; whatever ends the stream, the engine's request ends too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dataplane.engine.messages import Delta, Logprobs, Sampling, Submit
from dataplane.frontend.detokenizer import Detokenizer, StopStrings
from dataplane.frontend.tokenizer import Tokenizer
from dataplane.token_stream import End, Piece, SlowReaderError, TokenStream
from tests.dataplane.doubles import ScriptedEngine, delta
from tests.dataplane.frontend.conftest import train_byte_level
from veneer.errors import InternalError, UnavailableError, VeneerError

SUBMIT = Submit(request_id="r", tenant="acme", prompt=(1,), sampling=Sampling(max_tokens=9))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_byte_level().save(str(path))
    return Tokenizer(path)


class Streams:
    """Opens streams over scripted engines."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.engine = ScriptedEngine()

    def ids(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def open(
        self,
        *script: Delta | VeneerError,
        stops: tuple[str, ...] = (),
        stop_ids: tuple[int, ...] = (),
        max_bytes: int = 1000,
        slow_reader_s: float = 60,
        **limits: int,
    ) -> TokenStream:
        self.engine.script = script
        return TokenStream(
            self.engine.submit(SUBMIT),
            detokenizer=Detokenizer(self.tokenizer.pieces),
            stops=StopStrings(stops),
            stop_ids=stop_ids,
            max_bytes=max_bytes,
            slow_reader_s=slow_reader_s,
            **limits,
        )

    def spelled(self, text: str, *, finish: bool = True) -> list[Delta]:
        """One delta for each token of a text."""
        ids = self.ids(text)
        return [
            delta(id_, index=place, finish="length" if finish and place == len(ids) - 1 else None)
            for place, id_ in enumerate(ids)
        ]


@pytest.fixture
def streams(tokenizer: Tokenizer) -> Streams:
    return Streams(tokenizer)


async def read(stream: TokenStream) -> list[Piece]:
    pieces = [await stream.next()]
    while pieces[-1].end is None:
        pieces.append(await stream.next())
    return pieces


async def test_all_tokens_and_all_text_arrive_in_order(streams: Streams) -> None:
    text = "naïve 你好 👩‍👩‍👧 the end"
    stream = streams.open(*streams.spelled(text))
    pieces = await read(stream)
    ids = [id_ for piece in pieces for id_ in piece.ids]
    assert tuple(ids) == streams.ids(text)
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.index for piece in pieces] == [sum(len(piece.ids) for piece in pieces[:n]) for n in range(len(pieces))]
    assert pieces[-1].end == End("length", 3, len(ids))
    await stream.close()
    assert streams.engine.aborted == []


async def test_tokens_that_wait_come_as_one_piece(streams: Streams) -> None:
    stream = streams.open(*streams.spelled("the quick brown fox jumps"))
    await streams.engine.until_taken(5)
    await stream._task
    (piece,) = await read(stream)
    assert piece.text == "the quick brown fox jumps"


async def test_the_text_of_a_stop_token_is_not_sent_but_counted(streams: Streams) -> None:
    ids = streams.ids("the fox.")
    stream = streams.open(delta(*ids, finish="stop"), stop_ids=(ids[-1],))
    (piece,) = await read(stream)
    assert (piece.text, piece.ids, piece.end) == ("the fox", ids, End("stop", 3, len(ids)))


async def test_a_token_of_the_stop_list_in_the_middle_has_its_text(streams: Streams) -> None:
    ids = streams.ids("the fox.")
    stream = streams.open(delta(*ids, finish="length"), stop_ids=(ids[-1],))
    (piece,) = await read(stream)
    assert piece.text == "the fox."


async def test_a_stop_string_ends_the_request_and_what_came_after_it_is_dropped(streams: Streams) -> None:
    deltas = streams.spelled("the quick END brown", finish=False)
    stream = streams.open(*deltas, stops=(" END",))
    pieces = await read(stream)
    assert "".join(piece.text for piece in pieces) == "the quick"
    last = pieces[-1].end
    assert last is not None
    assert last.reason == "stop"
    assert last.completion_tokens == sum(len(piece.ids) for piece in pieces) < len(deltas)
    await stream.close()
    assert streams.engine.aborted == ["r"]


async def test_text_that_was_held_back_comes_at_the_end(streams: Streams) -> None:
    stream = streams.open(*streams.spelled("the fox EN"), stops=("END",))
    assert "".join(piece.text for piece in await read(stream)) == "the fox EN"


@pytest.mark.parametrize("reason", ["length", "stop"])
async def test_an_unfinished_character_at_the_end_is_left_out_and_its_ids_are_sent(streams: Streams, reason: str) -> None:
    ids = (*streams.ids("the fox"), *streams.ids("👩")[:-1])
    stream = streams.open(delta(*ids, finish=reason))
    (piece,) = await read(stream)
    assert (piece.text, piece.ids) == ("the fox", ids)
    assert streams.tokenizer.decode(ids) != "the fox"


async def test_an_unfinished_character_is_no_reason_to_keep_a_possible_stop_string_back(streams: Streams) -> None:
    ids = (*streams.ids("the fox EN"), *streams.ids("👩")[:-1])
    (piece,) = await read(streams.open(delta(*ids, finish="length"), stops=("END",)))
    assert piece.text == "the fox EN"


async def test_a_stop_string_across_min_tokens_counts_where_it_ends(streams: Streams) -> None:
    deltas = streams.spelled("a. END b. END c")
    ids = [one.ids[0] for one in deltas]
    texts = [streams.tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
    begins = next(n for n, text in enumerate(texts) if len(text) > len("a. "))  # the token that the stop string begins in
    ends = next(n for n, text in enumerate(texts) if text.startswith("a. END"))
    assert ends > begins
    for min_tokens in range(len(ids)):
        pieces = await read(streams.open(*deltas, stops=("END",), min_tokens=min_tokens))
        first = "a. " if min_tokens <= ends else "a. END b. " if min_tokens <= texts.index("a. END b. END") else texts[-1]
        assert "".join(piece.text for piece in pieces) == first


async def test_what_came_before_an_error_is_given_first(streams: Streams) -> None:
    stream = streams.open(*streams.spelled("the fox", finish=False), UnavailableError("the engine ended"))
    await stream._task
    assert (await stream.next()).text == "the fox"
    with pytest.raises(UnavailableError, match="the engine ended"):
        await stream.next()


async def test_a_stream_without_a_reason_is_no_good_end(streams: Streams) -> None:
    async def broken() -> object:
        yield delta(*streams.ids("fox"))

    stream = streams.open()
    await stream.close()
    stream = TokenStream(
        broken(),
        detokenizer=Detokenizer(streams.tokenizer.pieces),
        stops=StopStrings(()),
        stop_ids=(),
        max_bytes=100,
        slow_reader_s=1,
    )
    await stream._task
    await stream.next()
    with pytest.raises(InternalError):
        await stream.next()


async def test_a_reader_that_never_reads_loses_its_stream_and_holds_little(streams: Streams) -> None:
    deltas = [delta(*streams.ids("the quick brown fox"), index=place) for place in range(1000)]
    stream = streams.open(*deltas, max_bytes=200, slow_reader_s=0.05)
    await stream._task
    assert streams.engine.aborted == ["r"]
    assert streams.engine.num_taken < 12
    with pytest.raises(SlowReaderError):
        await stream.next()


async def test_a_reader_that_reads_in_time_gets_everything(streams: Streams) -> None:
    deltas = streams.spelled("the quick brown fox " * 50)
    stream = streams.open(*deltas, max_bytes=30, slow_reader_s=30)
    pieces = await read(stream)
    assert sum(len(piece.ids) for piece in pieces) == len(deltas)
    assert max(len(piece.ids) for piece in pieces) < 20


@pytest.mark.parametrize("num_read", [0, 1])
async def test_closing_a_stream_aborts_its_request(streams: Streams, num_read: int) -> None:
    stream = streams.open(*streams.spelled("the fox", finish=False)[:1])
    for _ in range(num_read):
        await stream.next()
    await streams.engine.until_taken(1)
    await stream.close()
    await stream.close()
    assert streams.engine.aborted == ["r"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_stop_strings_are_not_looked_for_before_the_least_number_of_tokens(streams: Streams) -> None:
    deltas = streams.spelled("a b a b a b")
    early, late = streams.open(*deltas, stops=("b",), min_tokens=0), None
    assert "".join(piece.text for piece in await read(early)) == "a "
    late = streams.open(*deltas, stops=("b",), min_tokens=len(streams.ids("a b a")))
    assert "".join(piece.text for piece in await read(late)) == "a b a "
    await early.close()
    await late.close()


async def test_tokens_that_wait_are_bounded_by_their_number_too(streams: Streams) -> None:
    stream = streams.open(*streams.spelled("a b c d e f g h i j"), max_waiting=3)
    await streams.engine.until_taken(3)
    while (piece := await stream.next()).end is None:
        assert len(piece.ids) <= 3
    await stream.close()


async def test_logprobs_stay_with_their_tokens_and_end_with_them(streams: Streams) -> None:
    scores = tuple(Logprobs(-float(place), ((place, -float(place)),)) for place in range(1, 9))
    ids = streams.ids("a b a b")
    whole = Delta("r", 0, ids, "length", 3, scores[: len(ids)], (Logprobs(-9.0),))
    stream = streams.open(whole, stops=("b",))
    pieces = await read(stream)
    got = [one for piece in pieces for one in piece.logprobs]
    num_ids = sum(len(piece.ids) for piece in pieces)
    assert num_ids < len(ids)
    assert got == list(scores[:num_ids])
    assert pieces[0].prompt_logprobs == (Logprobs(-9.0),)
    await stream.close()
