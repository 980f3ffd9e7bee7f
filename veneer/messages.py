"""What a caller gives a model: the messages of a conversation, raw text, or token ids; and the request fields made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from veneer.dataplane.v1 import generation_pb2
from veneer.errors import InvalidArgumentError, Violation

Message = generation_pb2.ChatMessage | Mapping[str, str] | tuple[str, str]
"""One message: `{"role": "user", "content": "Hello"}`, `("user", "Hello")`, or the API's own message."""

Messages = str | Sequence[Message]
"""A conversation, oldest message first; a string is one message of the user."""


@dataclass(frozen=True, slots=True)
class RawText:
    """Text that the model continues as it is, without the chat template."""

    text: str


Prompt = RawText | Sequence[int] | Sequence[generation_pb2.ChatMessage]
"""Raw text, token ids, or a conversation."""

_KEYS = {"role", "content"}
_FORMS = 'a message is {"role": "user", "content": "…"}, ("user", "…"), or a ChatMessage'


def read_messages(messages: Messages) -> list[generation_pb2.ChatMessage]:
    """The conversation as the API's messages.

    Raises:
        InvalidArgumentError: There is no message, or one is in no form that is known; every fault is listed.
    """
    if isinstance(messages, str):
        _check_text(messages, "messages")
        return [generation_pb2.ChatMessage(role="user", content=messages)]
    if not isinstance(messages, Sequence) or isinstance(messages, (bytes, bytearray)):
        kind = type(messages).__name__
        raise InvalidArgumentError.of([Violation("messages", f"is a {kind}; give a string or a list of messages")])
    if not messages:
        raise InvalidArgumentError.of([Violation("messages", "is empty; give at least one message")])
    read, faults = list[generation_pb2.ChatMessage](), list[Violation]()
    for place, message in enumerate(messages):
        try:
            read.append(_read(message, f"messages[{place}]"))
        except InvalidArgumentError as error:
            faults += error.violations
    if faults:
        raise InvalidArgumentError.of(faults)
    return read


def read_raw(prompt: str | Sequence[int]) -> RawText | Sequence[int]:
    """Raw text or token ids.

    Raises:
        InvalidArgumentError: It is neither.
    """
    if isinstance(prompt, str):
        return RawText(prompt)
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray))
    if is_list and all(isinstance(one, int) and not isinstance(one, bool) for one in prompt):
        return prompt
    raise InvalidArgumentError.of([Violation("prompt", "is neither text nor a list of token ids; `chat` takes messages")])


def set_prompt(request: generation_pb2.GenerateRequest, prompt: Prompt) -> None:
    """Writes the prompt into a request.

    Raises:
        InvalidArgumentError: It is a bare string, which may be meant as a question or as raw text; or it is in no form that is
            known, or a number is no token id.
    """
    if isinstance(prompt, str):
        choices = "`chat` and `stream_chat` ask it as a question, `complete` and `stream_complete` continue it as raw text"
        raise InvalidArgumentError.of([Violation("prompt", f"is a bare string: {choices}")])
    if isinstance(prompt, RawText):
        _check_text(prompt.text, "prompt")
        request.text = prompt.text
    elif prompt and isinstance(prompt[0], generation_pb2.ChatMessage):
        request.chat.messages.extend(prompt)  # type: ignore[arg-type]
    else:
        request.tokens.SetInParent()
        try:
            request.tokens.ids.extend(prompt)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError.of([Violation("prompt", f"token ids are numbers of 0 to 2^32 - 1: {error}")]) from error


def _read(message: object, field: str) -> generation_pb2.ChatMessage:
    if isinstance(message, generation_pb2.ChatMessage):
        return message
    if isinstance(message, Mapping):
        keys = set(message)
        if keys != _KEYS:
            lacks = [f"lacks {key!r}" for key in sorted(_KEYS - keys)]
            odd = [f"has {key!r}, which is no part of a message" for key in sorted(map(str, keys - _KEYS))]
            raise InvalidArgumentError.of([Violation(field, "; ".join((*lacks, *odd, _FORMS)))])
        role, content = message["role"], message["content"]
    elif isinstance(message, (tuple, list)) and len(message) == len(_KEYS):
        role, content = message
    else:
        raise InvalidArgumentError.of([Violation(field, f"is a {type(message).__name__}; {_FORMS}")])
    for name, value in (("role", role), ("content", content)):
        if not isinstance(value, str):
            raise InvalidArgumentError.of([Violation(f"{field}.{name}", f"is a {type(value).__name__}; it must be a string")])
        _check_text(value, f"{field}.{name}")
    return generation_pb2.ChatMessage(role=role, content=content)


def _check_text(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError.of([Violation(field, f"is no valid Unicode text at character {error.start}")]) from error
