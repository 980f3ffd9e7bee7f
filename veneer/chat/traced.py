"""Text that remembers which of its characters came from the contents of a conversation.

A `Traced` is a str with a twin of the same length: the same text with every character of a content, spaces apart, blanked to
NUL. Whatever a template does to the text happens to the twin too, so an operation needs no rule of its own for where characters
go: `('[INST] ' + content).strip()` strips both. Where text and twin come out different in length, or the operation fails on the
twin, the whole result counts as content: a trace is never lost in favour of the template. Decisions of the template (`in`,
`startswith`, `==`) see the text alone, so the text is what a plain str would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import Undefined

BLANK = "\0"
"""Stands in a twin for a character of a content."""


_WITHOUT_TEXT = (int, float, bool, type(None), range)


class _Blanks(dict[int, int]):
    """Table for `str.translate`: NUL for every character but spaces, which templates trim and split at."""

    def __missing__(self, code: int) -> int:
        value = self[code] = code if chr(code).isspace() else 0
        return value


_BLANKS = _Blanks()


class Traced(str):
    """A str with a twin. Immutable.

    Args:
        text: The text.
        twin: As long as the text; None: all of the text is content.
    """

    __slots__ = ("_twin",)
    _twin: str

    def __new__(cls, text: str, twin: str | None = None) -> Traced:  # noqa: PYI034  it has no subclass
        """Makes one; `twin` must be as long as `text`."""
        traced = super().__new__(cls, text)
        traced._twin = text.translate(_BLANKS) if twin is None else twin
        return traced

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        return (Traced(text, twin) for text, twin in zip(str.__iter__(self), self._twin, strict=True))

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return Traced(str.__add__(other, self), twin_of(other) + self._twin)


def twin_of(text: str) -> str:
    """Returns the twin of a text; a text of the template is its own."""
    return text._twin if isinstance(text, Traced) else text  # noqa: SLF001  same module


def join(pieces: Iterable[Any]) -> str:
    """Joins the pieces of a template's output."""
    texts = list(pieces)
    text = "".join(texts)
    return Traced(text, "".join(map(twin_of, texts))) if any(isinstance(one, Traced) for one in texts) else text


def holds_trace(value: Any) -> bool:
    """Says whether a value may have a traced text somewhere: an object of a kind that is not known here may."""
    if isinstance(value, str | Undefined) or type(value) in _WITHOUT_TEXT:
        return isinstance(value, Traced)
    if isinstance(value, list | tuple):
        return any(map(holds_trace, value))
    if isinstance(value, dict):
        return any(map(holds_trace, value)) or any(map(holds_trace, value.values()))
    return True


def twins_in(value: Any) -> Any:
    """Returns the value with the twin of every traced text in its place.

    Raises:
        TypeError: There is an object of a kind that is not known here, and may have a text.
    """
    if isinstance(value, str):
        return twin_of(value)
    if isinstance(value, Undefined) or type(value) in _WITHOUT_TEXT:
        return value
    if type(value) in (list, tuple):
        return type(value)(map(twins_in, value))
    if type(value) is dict:
        return {twins_in(key): twins_in(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} may have a text")


def text_of(value: Any) -> str:
    """Returns what a template writes for a value: its `str`, with the trace of the texts in it."""
    if isinstance(value, str):
        return value.__str__()
    text = str(value)
    return Traced(text) if holds_trace(value) else text


def retrace(result: Any, again: Callable[[], Any]) -> Any:
    """Gives an operation's result its trace.

    Args:
        result: Of the operation on texts: a str, or a list or tuple of these. Anything else is returned as it is.
        again: Does the operation on the twins.
    """
    if not isinstance(result, str | list | tuple):
        return result
    try:
        twin = again()
    except Exception:  # noqa: BLE001  an operation that fails on twins leaves no trace to follow
        twin = None
    return _pair(result, twin)


def _pair(result: Any, twin: Any) -> Any:
    if isinstance(result, Traced):
        return result
    if isinstance(result, str):
        is_twin = isinstance(twin, str) and len(twin) == len(result)
        return Traced(str.__str__(result), str.__str__(twin) if is_twin else None)
    if type(result) in (list, tuple):
        is_alike = type(twin) is type(result) and len(twin) == len(result)
        return type(result)(_pair(one, twin[place] if is_alike else None) for place, one in enumerate(result))
    return result


def _method(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def method(self: Traced, *args: Any, **kwargs: Any) -> Any:
        args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
        result = plain(self, *args, **kwargs)
        return retrace(result, lambda: plain(self._twin, *map(twins_in, args), **twins_in(kwargs)))

    method.__name__ = name
    method.__qualname__ = f"Traced.{name}"
    return method


_TEXT_METHODS = (
    "__add__ __mul__ __rmul__ __mod__ __getitem__ capitalize casefold center expandtabs format format_map join ljust lower "
    "lstrip partition removeprefix removesuffix replace rjust rpartition rsplit rstrip split splitlines strip swapcase title "
    "translate upper zfill"
).split()
for _name in _TEXT_METHODS:
    setattr(Traced, _name, _method(_name))
