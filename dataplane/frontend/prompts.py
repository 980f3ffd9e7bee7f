"""Prompts as token ids: the one place where text, conversations and ids become what the engine takes, and are checked.

The limit on length is the engine's own context limit; nothing else in the data plane knows another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dataplane.frontend.chat_template import ChatTemplate, RenderedChat
from dataplane.frontend.detokenizer import Detokenizer
from dataplane.frontend.grammars import Grammars
from dataplane.frontend.tokenizer import Tokenizer, TokenizerError
from veneer.artifact import read_eos_ids
from veneer.chat.source import read_chat
from veneer.chat.wire import Order
from veneer.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, Violation

_log = logging.getLogger(__name__)
_SHORT = 1024  # characters; so many are tokenized in well under a millisecond, less than a hop to another thread costs


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, taken as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation: (role, content) pairs in order."""

    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How conversations are rendered.

    Attributes:
        num_processes: Conversations that are rendered at the same time.
        max_cpu_s: Processor time that one may take.
        content_tokens: Control tokens in contents are read as such; else they are ordinary text.
    """

    num_processes: int = 2
    max_cpu_s: float = 1.0
    content_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """A prompt that fits, and how many tokens may follow it.

    Attributes:
        ids: Token ids of the prompt.
        max_tokens: Tokens to generate at most.
    """

    ids: tuple[int, ...]
    max_tokens: int


class Prompts:
    """Turns prompts into token ids. Owned by the serving process; call it from the event loop.

    Attributes:
        tokenizer: The base's tokenizer.
        max_context: As given.
        vocab_size: As given.
        eos_ids: Ids that end a sequence.
        grammars: Checks what a text must match.

    Args:
        folder: The base model's folder.
        max_context: Tokens of prompt and output together.
        vocab_size: Rows of the model's embedding; ids of prompts are below it.
        num_threads: Threads for long prompts.
        max_pending: Long prompts that may wait for those threads, and conversations that may wait to be rendered.
        chat: How conversations are rendered.

    Raises:
        TokenizerError: The folder's tokenizer is missing or not supported. What is wrong with a chat template is told by `start`,
            and when a conversation comes.
        ArtifactError: A file of the folder is broken, or names no token as the end of a sequence.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_context: int,
        vocab_size: int,
        num_threads: int = 2,
        max_pending: int = 1024,
        chat: ChatOptions | None = None,
    ) -> None:
        chat = chat or ChatOptions()
        source = read_chat(folder)
        controls = () if chat.content_tokens or source.template is None else source.controls
        self.tokenizer = Tokenizer(folder / "tokenizer.json", controls=controls)
        self.max_context = max_context
        self.vocab_size = vocab_size
        if self.tokenizer.vocab_size > vocab_size:
            raise TokenizerError(f"tokenizer.json knows {self.tokenizer.vocab_size} ids, the model only {vocab_size}")
        self._no_chat = source.fault
        self._template = None
        if source.template is not None:
            order = Order(
                source.template,
                source.variables,
                controls,
                always_places=self.tokenizer.reads_disguises,
                max_cpu_s=chat.max_cpu_s,
            )
            self._template = ChatTemplate(order, num_processes=chat.num_processes, max_pending=max_pending)
        self.eos_ids = read_eos_ids(folder, vocab_size=vocab_size)
        self.grammars = Grammars(folder, vocab_size=vocab_size, eos_ids=self.eos_ids)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="prompts")
        self._pending = 0
        self._max_pending = max_pending

    @property
    def chat_fault(self) -> str:
        """Why conversations cannot be served, as far as it is known; empty: they can, or it was not tried yet."""
        if self._template is None:
            cause = f"the base model's chat template cannot be read: {self._no_chat}"
            return cause if self._no_chat else "the base model has no chat template"
        return self._template.fault

    async def start(self) -> None:
        """Starts what renders conversations, and logs why they cannot be served where that is so."""
        if self._template is not None:
            await self._template.start()
        if self.chat_fault:
            _log.warning("the base serves texts and token ids, but no conversations", extra={"cause": self.chat_fault})

    def close(self) -> None:
        """Lets threads and processes end."""
        if self._template is not None:
            self._template.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()

    def detokenizer(self) -> Detokenizer:
        """Returns a detokenizer for one request."""
        return Detokenizer(self.tokenizer.pieces)

    def cut_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences of words, each alone and after a space."""
        cut = (
            self.tokenizer.encode(spelling, add_special_tokens=False)
            for word in words
            for spelling in (word.lstrip(" "), " " + word.lstrip(" "))
        )
        return tuple(dict.fromkeys(ids for ids in cut if ids))

    def stop_ids(self, stops: Sequence[str]) -> tuple[int, ...]:
        """Returns the ids of stop strings that are special tokens: these have no text in which they could be found.

        Raises:
            InvalidArgumentError: A special token stands within a longer stop string.
        """
        special, ids, faults = self.tokenizer.special_tokens, [], []
        for place, stop in enumerate(stops):
            if (id_ := special.get(stop)) is not None:
                ids.append(id_)
            elif token := self.tokenizer.special_token_in(stop):
                fault = f"contains the special token {token!r}, which has no text: name it alone, or its id in stop_token_ids"
                faults.append(Violation(f"sampling.stop[{place}]", fault))
        if faults:
            raise InvalidArgumentError.of(faults)
        return tuple(ids)

    async def prepare(self, prompt: Prompt, *, max_tokens: int | None, tenant: str = "") -> Budget:
        """Returns the prompt's ids and how many tokens may follow; long texts are tokenized on another thread.

        Args:
            prompt: The prompt.
            max_tokens: Tokens to generate at most; None: until the context is full.
            tenant: Whose it is; tenants wait for the rendering of conversations by turns.

        Raises:
            InvalidArgumentError: It is empty, too long with `max_tokens`, has ids outside the vocabulary, or the template refuses
                it.
            FailedPreconditionError: It is a conversation, and the base has no template that can be used, or this one goes beyond
                its limits.
            ResourceExhaustedError: Too many long prompts or conversations wait.
        """
        match prompt:
            case TokenPrompt(ids):
                pass
            case TextPrompt(text):
                ids = await self._run(lambda: self._encode_text(text), len(text))
            case ChatPrompt(messages):
                chat = await self._render(messages, tenant)
                ids = await self._run(lambda: self._encode_chat(chat), len(chat.text))
        budget = self._fit(ids, prompt, max_tokens)
        if isinstance(prompt, TokenPrompt):
            self._check_ids(ids)
        return budget

    async def _run(self, work: Callable[[], tuple[int, ...]], length: int) -> tuple[int, ...]:
        if length <= _SHORT:
            return work()
        if self._pending >= self._max_pending:
            raise ResourceExhaustedError("too many long prompts wait to be tokenized", retry_after_s=1.0)
        self._pending += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(self._one_less)  # also when the caller goes away: the thread works on until it is done
        return await asyncio.shield(future)

    def _one_less(self, future: asyncio.Future[tuple[int, ...]]) -> None:
        self._pending -= 1
        if not future.cancelled():
            future.exception()  # seen, even when nobody waits any more

    async def _render(self, messages: tuple[tuple[str, str], ...], tenant: str) -> RenderedChat:
        if self._template is None:
            raise FailedPreconditionError(f"{self.chat_fault}; send a text or token ids")
        return await self._template.render(messages, tenant=tenant)

    def _encode_chat(self, chat: RenderedChat) -> tuple[int, ...]:
        self._check_length(chat.text, "chat")
        return self.tokenizer.encode_chat(chat.text, chat.controls)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        self._check_length(text, "text")
        return self.tokenizer.encode(text, add_special_tokens=True)

    def _check_length(self, text: str, field: str) -> None:
        """Refuses a text whose length alone shows that it cannot fit: to tokenize 4 MiB takes seconds, to refuse them nothing."""
        longest = self.tokenizer.max_token_bytes
        if longest is not None and len(text) > self.max_context * longest:
            least = -(-len(text) // longest)
            raise InvalidArgumentError.of(
                [
                    Violation(
                        field, f"the prompt has at least {least} tokens; at most {self.max_context - 1} leave room for one more"
                    )
                ]
            )

    def _check_ids(self, ids: tuple[int, ...]) -> None:
        if min(ids) >= 0 and max(ids) < self.vocab_size:
            return
        for place, id_ in enumerate(ids):
            if not 0 <= id_ < self.vocab_size:
                raise InvalidArgumentError.of(
                    [Violation(f"tokens.ids[{place}]", f"{id_} is not below the vocabulary's size, {self.vocab_size}")]
                )

    def _fit(self, ids: tuple[int, ...], prompt: Prompt, max_tokens: int | None) -> Budget:
        field = {TextPrompt: "text", ChatPrompt: "chat", TokenPrompt: "tokens.ids"}[type(prompt)]
        if not ids:
            raise InvalidArgumentError.of([Violation(field, "the prompt has no tokens; at least 1 is needed")])
        room = self.max_context - len(ids)
        if room < 1:
            raise InvalidArgumentError.of(
                [Violation(field, f"the prompt has {len(ids)} tokens; at most {self.max_context - 1} leave room for one more")]
            )
        if max_tokens is None:
            return Budget(ids, room)
        if max_tokens < 1:
            raise InvalidArgumentError.of([Violation("sampling.max_tokens", f"{max_tokens} is below 1")])
        if max_tokens > room:
            raise InvalidArgumentError.of(
                [
                    Violation(
                        "sampling.max_tokens",
                        f"{max_tokens} is more than the {room} that fit after a prompt of {len(ids)} tokens",
                    )
                ]
            )
        return Budget(ids, max_tokens)
