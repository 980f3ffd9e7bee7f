"""Prompts become ids that fit, or are refused with field and limit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from dataplane.frontend.prompts import ChatPrompt, Prompt, Prompts, TextPrompt, TokenPrompt
from dataplane.frontend.tokenizer import TokenizerError
from veneer.errors import FailedPreconditionError, InvalidArgumentError


@pytest.fixture
def prompts(model_dir: Path) -> Iterator[Prompts]:
    made = Prompts(model_dir, max_context=16, vocab_size=500, num_threads=1, max_pending=2)
    yield made
    made.close()


async def test_a_text_is_taken_as_it_is(prompts: Prompts) -> None:
    budget = await prompts.prepare(TextPrompt("the fox"), max_tokens=3)
    assert prompts.tokenizer.decode(budget.ids) == "the fox"
    assert budget.max_tokens == 3


async def test_without_max_tokens_the_context_is_filled(prompts: Prompts) -> None:
    budget = await prompts.prepare(TokenPrompt((5, 6, 7)), max_tokens=None)
    assert budget.max_tokens == 13


async def test_a_conversation_goes_through_the_template(prompts: Prompts) -> None:
    prompts.max_context = 64
    budget = await prompts.prepare(ChatPrompt((("user", "hi"),)), max_tokens=1)
    assert budget.ids[0] == 1
    assert 2 in budget.ids


async def test_the_end_of_sequence_comes_from_the_generation_config(prompts: Prompts) -> None:
    assert prompts.eos_ids == (2, 0)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field", "words"),
    [
        (TokenPrompt(()), 1, "tokens.ids", "at least 1"),
        (TextPrompt(""), 1, "text", "at least 1"),
        (TokenPrompt((5,) * 16), None, "tokens.ids", "16 tokens; at most 15"),
        (TokenPrompt((5,) * 17), 1, "tokens.ids", "at most 15"),
        (TokenPrompt((5,) * 15), 2, "sampling.max_tokens", "2 is more than the 1"),
        (TokenPrompt((5,)), 0, "sampling.max_tokens", "below 1"),
        (TokenPrompt((5, 500)), 1, "tokens.ids[1]", "500 is not below the vocabulary's size, 500"),
        (TokenPrompt((-1,)), 1, "tokens.ids[0]", "-1"),
        (TextPrompt("fox " * 40), 1, "text", "at most 15"),
        (ChatPrompt((("user", "fox " * 400),)), 1, "chat", "at most 15"),
        (TextPrompt("fox " * 1_000_000), 1, "text", "at most 15"),
    ],
)
async def test_what_does_not_fit_is_refused_with_field_and_limit(
    prompts: Prompts, prompt: Prompt, max_tokens: int | None, field: str, words: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await prompts.prepare(prompt, max_tokens=max_tokens)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert words in violation.description


async def test_the_longest_prompt_that_fits_is_accepted(prompts: Prompts) -> None:
    budget = await prompts.prepare(TokenPrompt((5,) * 15), max_tokens=1)
    assert (len(budget.ids), budget.max_tokens) == (15, 1)


async def test_more_long_prompts_than_may_wait_are_refused_at_once(prompts: Prompts) -> None:
    long = TextPrompt("fox " * 20_000)
    results = await asyncio.gather(*(prompts.prepare(long, max_tokens=1) for _ in range(4)), return_exceptions=True)
    kinds = sorted(type(result).__name__ for result in results)
    assert kinds == ["InvalidArgumentError"] * 2 + ["ResourceExhaustedError"] * 2
    with pytest.raises(InvalidArgumentError):
        await prompts.prepare(long, max_tokens=1)  # the places are free again


async def test_a_long_prompt_whose_caller_left_gives_its_place_back(prompts: Prompts) -> None:
    long = TextPrompt("fox " * 20_000)
    for _ in range(2):
        task = asyncio.create_task(prompts.prepare(long, max_tokens=1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.get_running_loop().run_in_executor(prompts._threads, lambda: None)  # the one thread is done with both
    with pytest.raises(InvalidArgumentError):
        await prompts.prepare(long, max_tokens=1)


async def test_a_base_without_a_template_refuses_conversations(model_dir: Path) -> None:
    (model_dir / "tokenizer_config.json").unlink()
    prompts = Prompts(model_dir, max_context=16, vocab_size=500)
    with pytest.raises(FailedPreconditionError, match="no chat template"):
        await prompts.prepare(ChatPrompt((("user", "hi"),)), max_tokens=1)
    prompts.close()


def test_a_template_file_beside_the_config_wins(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "rag", "template": "x"}]}))
    prompts = Prompts(model_dir, max_context=16, vocab_size=500)
    budget = asyncio.run(prompts.prepare(ChatPrompt((("user", "fox"),)), max_tokens=1))
    assert prompts.tokenizer.decode(budget.ids) == "fox"
    prompts.close()


def test_a_tokenizer_larger_than_the_model_is_refused(model_dir: Path) -> None:
    with pytest.raises(TokenizerError, match="the model only 100"):
        Prompts(model_dir, max_context=16, vocab_size=100)


@pytest.mark.parametrize("writes_it", [True, False])
async def test_the_token_that_begins_a_text_stands_there_once(model_dir: Path, *, writes_it: bool) -> None:
    """A tokenizer that puts it before every text, and a template that may write it too."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))]
    )
    tokenizer.save(str(model_dir / "tokenizer.json"))
    template = ("{{ bos_token }}" if writes_it else "") + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": "<|im_start|>"}))
    prompts = Prompts(model_dir, max_context=64, vocab_size=500, num_threads=1)
    begin = tokenizer.token_to_id("<|im_start|>")
    text = (await prompts.prepare(TextPrompt("the fox"), max_tokens=1)).ids
    chat = (await prompts.prepare(ChatPrompt((("user", "the fox"),)), max_tokens=1)).ids
    prompts.close()
    assert (text[0], text.count(begin)) == (begin, 1)
    assert chat == (text if writes_it else text[1:]), "a conversation has what its template writes, and nothing besides"
