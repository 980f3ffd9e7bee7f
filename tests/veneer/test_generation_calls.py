"""`chat` and `complete`: what they send, and the answer that they gather."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import veneer
from tests.veneer.scripted import LAST, SERVED, Generation, collect
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2 as pb
from veneer.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from veneer.messages import RawText, read_messages


def message(role: str, content: str) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=content)


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        [{"role": "user", "content": "hi"}],
        [("user", "hi")],
        (["user", "hi"],),
        [message("user", "hi")],
    ],
    ids=["question", "dicts", "pairs", "lists", "messages"],
)
async def test_a_conversation_is_taken_in_every_form(client: Client, generation: Generation, messages: Any) -> None:
    generation.scripts = [[SERVED, LAST]] * 2
    answer = await client.chat(messages, adapter="tone")
    await collect(client.stream_chat(messages))
    assert [list(one.chat.messages) for one in generation.requests] == [[message("user", "hi")]] * 2
    assert generation.requests[0].adapter.adapter == "tone"
    assert (answer.text, str(answer), answer.token_ids, answer.usage.total_tokens) == ("ab", "ab", (7, 8), 2)


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([], ["messages"]),
        (None, ["messages"]),
        (b"hi", ["messages"]),
        ({"role": "user", "content": "hi"}, ["messages"]),
        (["hi"], ["messages[0]"]),
        (("user", "hi"), ["messages[0]", "messages[1]"]),
        ([{"role": "user"}, {"role": "user", "content": "hi", "name": "me"}], ["messages[0]", "messages[1]"]),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], ["messages[0].content"]),
        ([{"role": "user", "content": None}], ["messages[0].content"]),
        ([("user", "hi", "there")], ["messages[0]"]),
        ([("user", "\ud800")], ["messages[0].content"]),
        ("\ud800", ["messages"]),
    ],
)
def test_what_is_no_conversation_is_refused_with_every_fault(messages: Any, fields: list[str]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_messages(messages)
    assert [one.field for one in caught.value.violations] == fields


async def test_raw_text_and_token_ids_are_continued_as_they_are(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED, LAST]] * 4
    assert (await client.complete("Once upon")).finish_reason == "stop"
    await client.complete([5, 6])
    await collect(client.stream_complete("Once upon"))
    await collect(client.generate(RawText("Once upon")))
    assert [one.WhichOneof("prompt") for one in generation.requests] == ["text", "tokens", "text", "text"]


@pytest.mark.parametrize("prompt", [[("user", "hi")], [message("user", "hi")], {"role": "user"}, None, b"hi", [True], ["hi"]])
async def test_raw_text_takes_no_messages(client: Client, prompt: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="`chat` takes messages"):
        await client.complete(prompt)


@pytest.mark.parametrize("ids", [[-1], [1 << 32], ["a"], [1.5]])
async def test_what_is_no_token_id_is_refused(client: Client, ids: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        await collect(client.generate(ids))


async def test_a_bare_string_names_the_two_choices(client: Client, generation: Generation) -> None:
    prompt: Any = "May I keep a hen?"
    with pytest.raises(InvalidArgumentError, match=r"`chat`.*`complete`"):
        await collect(client.generate(prompt))
    assert not generation.requests


async def test_sampling_is_given_by_keywords_or_whole(client: Client, generation: Generation) -> None:
    generation.scripts = [[SERVED, LAST]] * 2
    await client.chat("hi", max_tokens=3, temperature=0, stop=["."], logit_bias={5: -100.0}, structured_outputs={"regex": "a+"})
    await client.chat("hi", sampling=pb.SamplingParams(max_tokens=3))
    first, second = (one.sampling for one in generation.requests)
    assert (first.max_tokens, first.temperature, list(first.stop), dict(first.logit_bias)) == (3, 0, ["."], {5: -100.0})
    assert first.structured_outputs.regex == "a+"
    assert second == pb.SamplingParams(max_tokens=3)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": "."}, "stop"),
        ({"bad_words": "hen"}, "bad_words"),
        ({"bad_words": b"hen"}, "bad_words"),
        ({"stop": {".": 1}}, "stop"),
        ({"structured_outputs": {"json": "{}", "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "object"}}}, "structured_outputs"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"max_tokens": 3, "sampling": pb.SamplingParams()}, "sampling"),
    ],
)
async def test_an_option_that_is_not_what_it_must_be_is_named(client: Client, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await client.chat("hi", **options)
    assert [one.field for one in caught.value.violations] == [field]


async def test_an_unknown_option_is_a_type_error(client: Client) -> None:
    options: Any = {"max_new_tokens": 3}
    with pytest.raises(TypeError, match="max_new_tokens"):
        await client.chat("hi", **options)


async def test_choices_logprobs_and_the_prompt_are_kept_apart(client: Client, generation: Generation) -> None:
    def response(choice: int, text: str, *, reason: pb.FinishReason.ValueType | None = None, **more: Any) -> pb.GenerateResponse:
        chunk = pb.Chunk(choice=choice, ids=[ord(text)], text=text, logprobs=[pb.Logprobs(logprob=-0.5)])
        finish = None if reason is None else pb.Finish(choice=choice, reason=reason, prompt_tokens=4, completion_tokens=2)
        return pb.GenerateResponse(chunk=chunk, finish=finish, **more)

    first = response(0, "a", served=pb.Served(version="v", request_id="mine"), echo=pb.Echo(text="hi"))
    stop, length = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
    generation.scripts = [[first, response(1, "c"), response(1, "d", reason=length), response(0, "b", reason=stop)]]
    answer = await client.chat("hi", n=2, logprobs=0, echo=True)
    assert [(one.index, one.text, one.finish_reason, len(one.logprobs)) for one in answer.choices] == [
        (0, "ab", "stop", 2),
        (1, "cd", "length", 2),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 4)
    assert (answer.request_id, answer.served.version, answer.echo) == ("mine", "v", pb.Echo(text="hi"))
    assert answer.logprobs == answer.choices[0].logprobs


@pytest.mark.parametrize("script", [[SERVED], [SERVED, ResourceExhaustedError("full")], []])
async def test_half_an_answer_is_an_error(client: Client, generation: Generation, script: list[Any]) -> None:
    generation.scripts = [script]
    with pytest.raises((UnavailableError, ResourceExhaustedError)):
        await client.chat("hi")


def test_the_package_gives_clients_records_and_errors() -> None:
    for name, module in veneer._HOMES.items():
        found = getattr(veneer, name)
        assert found is getattr(sys.modules[f"veneer.{module}"], name)
        assert name in dir(veneer)
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        _ = veneer.Klient  # type: ignore[attr-defined]


def test_the_package_gives_what_its_type_checker_sees() -> None:
    imports = [one for one in ast.walk(ast.parse(Path(veneer.__file__).read_text())) if isinstance(one, ast.ImportFrom)]
    assert {name.asname: one.module for one in imports for name in one.names} == {
        name: f"veneer.{module}" for name, module in veneer._HOMES.items()
    }


def test_a_stub_is_imported_without_the_clients() -> None:
    script = "import sys, veneer.controlplane.v1.catalog_pb2; print('grpc' in sys.modules, 'veneer.client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
