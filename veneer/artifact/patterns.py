"""Regular expressions of strangers, matched in bounded time.

PEFT's configs hold regular expressions that Python's `re` may need exponential time for. This matcher answers only whether a
text matches: it carries the set of positions that are reachable, as the bits of an integer, so no path is ever tried twice.
What it does not know (look-around, back-references, flags, possessive forms) it refuses by name.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

Step = Callable[[str, int], int]
"""From a text and the positions reached so far (bit i: before character i) to the positions reached after this part."""

_MAX_NESTED_REPEATS = 3
_MAX_DEPTH = 32
_MAX_REPEAT = 1000
_ROUNDS = 64  # a repeat goes round about once for each character of a path, whatever its counts say
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_NO_DOT = re.compile(r"[^.]")
_COUNTS = re.compile(r"\{(\d{0,6})(?:(,)(\d{0,6}))?\}")
_NAMED_GROUP = re.compile(r"\?P<[A-Za-z_]\w{0,63}>", re.ASCII)
_WORD = frozenset(string.ascii_letters + string.digits + "_")
_CLASSES = {"d": frozenset(string.digits), "w": _WORD, "s": frozenset(string.whitespace)}


class PatternError(ValueError):
    """The expression is malformed, or uses what is not supported; the message says which."""


class Pattern:
    """A compiled expression. Immutable.

    Attributes:
        text: The expression.
        is_name: It is a plain name, in which a dot still stands for any character, as nearly all are.
        num_steps: Parts that one match may have to look at, repeats counted; 0 for a plain name.

    Args:
        text: The expression.

    Raises:
        PatternError: It cannot be used.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_name = _PLAIN.fullmatch(text) is not None
        compiled = _Part(_nowhere, num_steps=0) if self.is_name else _Parser(text).parse()
        self._step, self.num_steps = compiled.step, compiled.num_steps

    def matches_whole(self, path: str) -> bool:
        """Tells whether the whole path matches, as `re.fullmatch` does."""
        if self.is_name:
            return len(path) == len(self.text) and _masked(path, self.text) == self.text
        return bool(self._step(path, 1) >> len(path) & 1)

    def matches_tail(self, path: str) -> bool:
        """Tells whether the path ends in segments that match: PEFT's rule for rank_pattern and alpha_pattern.

        The match begins at the start of the path or right behind a dot, and reaches to the end.
        """
        if self.is_name:
            tail = _tail(path, len(self.text))
            return tail is not None and (tail == self.text or _masked(tail, self.text) == self.text)
        starts = 1
        for position, character in enumerate(path):
            if character == ".":
                starts |= 1 << (position + 1)
        return bool(self._step(path, starts) >> len(path) & 1)


class Names:
    """The plain names among patterns, to be looked up rather than tried: some adapters have a pattern for each of their modules.

    Names of one length with dots at the same places are one table, and a path's end, with dots put there, is its key. Immutable.

    Args:
        patterns: In order; others than names are passed over.
    """

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._tables: dict[str, dict[str, int]] = {}
        for place, pattern in enumerate(patterns):
            if pattern.is_name:
                shape = _NO_DOT.sub("x", pattern.text)
                self._tables.setdefault(shape, {}).setdefault(pattern.text, place)

    def matching_tail(self, path: str) -> list[int]:
        """Returns the places of those that match a path, in no order; see `Pattern.matches_tail`."""
        found = []
        for shape, names in self._tables.items():
            tail = _tail(path, len(shape))
            if tail is not None and (place := names.get(_masked(tail, shape))) is not None:
                found.append(place)
        return found


def _tail(path: str, length: int) -> str | None:
    """The end of a path, if it begins a segment."""
    start = len(path) - length
    return path[start:] if start == 0 or (start > 0 and path[start - 1] == ".") else None


def _masked(text: str, shape: str) -> str:
    """Puts dots into a text where a shape of its length has some."""
    pieces, start = [], 0
    for piece in shape.split("."):
        pieces.append(text[start : start + len(piece)])
        start += len(piece) + 1
    return ".".join(pieces)


def _nowhere(text: str, positions: int) -> int:  # noqa: ARG001 - a step's form
    raise AssertionError("a plain name is not matched in steps")


def _none_of(characters: frozenset[str], text: str, positions: int) -> int:
    """Consumes one character that is not in a set."""
    return (positions & ~_places(characters, text) & (1 << len(text)) - 1) << 1


def _one_of(characters: frozenset[str], text: str, positions: int) -> int:
    """Consumes one character of a set."""
    return (positions & _places(characters, text)) << 1


@lru_cache(maxsize=1 << 14)
def _places(characters: frozenset[str], text: str) -> int:
    """Where the text has a character of a set: bit i for character i."""
    return sum(places for character, places in _index(text).items() if character in characters)


@lru_cache(maxsize=1 << 12)
def _index(text: str) -> dict[str, int]:
    """Where the text has each of its characters."""
    places: dict[str, int] = {}
    for place, character in enumerate(text):
        places[character] = places.get(character, 0) | 1 << place
    return places


def _at(kind: str, text: str, positions: int) -> int:
    """Keeps the positions where an anchor holds."""
    if kind in "^A":
        return positions & 1
    if kind == "Z":
        return positions & 1 << len(text)
    if kind == "$":
        ends = 1 << len(text) | (1 << (len(text) - 1) if text.endswith("\n") else 0)
        return positions & ends
    words = _places(_WORD, text)
    boundaries = words ^ words << 1  # before a character that is one of a word, or behind it, but not both
    return positions & (boundaries if kind == "b" else ~boundaries)


def _sequence(steps: tuple[Step, ...], text: str, positions: int) -> int:
    for step in steps:
        if not positions:
            return 0
        positions = step(text, positions)
    return positions


def _choice(steps: tuple[Step, ...], text: str, positions: int) -> int:
    reached = 0
    for step in steps:
        reached |= step(text, positions)
    return reached


def _repeat(step: Step, least: int, most: int | None, text: str, positions: int) -> int:
    """Applies a step from `least` to `most` times; both loops end after at most len(text) + 2 rounds, when nothing changes."""
    for _ in range(least):
        following = step(text, positions)
        if following == positions:
            break
        positions = following
    reached = positions
    rounds = 0
    while positions and (most is None or rounds < most - least):
        positions = step(text, positions) & ~reached
        reached |= positions
        rounds += 1
    return reached


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an expression, compiled.

    Attributes:
        step: What it does.
        num_steps: Steps that it may take, repeats counted.
        nested: How deep repeats are nested in it.
        is_anchor: It consumes nothing, so it cannot be repeated.
    """

    step: Step
    num_steps: int = 1
    nested: int = 0
    is_anchor: bool = False


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._next = 0
        self._depth = 0

    def parse(self) -> _Part:
        whole = self._alternatives()
        if self._next < len(self._text):
            raise PatternError(f"unbalanced parenthesis at character {self._next}")
        return whole

    def _peek(self) -> str:
        return self._text[self._next : self._next + 1]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise PatternError("ends too early")
        self._next += 1
        return character

    def _alternatives(self) -> _Part:
        choices = [self._concatenation()]
        while self._peek() == "|":
            self._next += 1
            choices.append(self._concatenation())
        return choices[0] if len(choices) == 1 else _joined(_choice, choices)

    def _concatenation(self) -> _Part:
        parts: list[_Part] = []
        while self._peek() not in ("", "|", ")"):
            part = self._atom()
            counts = self._counts()
            parts.append(part if counts is None else self._repeated(part, *counts))
        return _joined(_sequence, parts)

    def _repeated(self, part: _Part, least: int, most: int | None) -> _Part:
        if part.is_anchor:
            raise PatternError(f"nothing to repeat at character {self._next}")
        if part.nested == _MAX_NESTED_REPEATS:
            raise PatternError(f"repeats are nested deeper than {_MAX_NESTED_REPEATS} levels")
        rounds = _ROUNDS if most is None else min(most, _ROUNDS)
        return _Part(partial(_repeat, part.step, least, most), 1 + part.num_steps * rounds, part.nested + 1)

    def _counts(self) -> tuple[int, int | None] | None:
        counts = self._one_count()
        if counts is None:
            return None
        if self._peek() == "?":  # lazy: the same texts match
            self._next += 1
        elif self._peek() == "+":
            raise PatternError("possessive repeats are not supported")
        if self._one_count() is not None:
            raise PatternError(f"multiple repeat at character {self._next}")
        return counts

    def _one_count(self) -> tuple[int, int | None] | None:
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self._peek() in simple:
            return simple[self._take()]
        match = _COUNTS.match(self._text, self._next)
        if match is None or match.group() in ("{}", "{,}"):
            if match is not None and match.group() == "{,}":
                self._next = match.end()
                return 0, None
            return None
        self._next = match.end()
        least = int(match[1] or 0)
        most: int | None = least if match[2] is None else (int(match[3]) if match[3] else None)
        if most is not None and most < least:
            raise PatternError("a repeat's least count is above its largest")
        if max(least, most or 0) > _MAX_REPEAT:
            raise PatternError(f"a repeat count is above {_MAX_REPEAT}")
        return least, most

    def _atom(self) -> _Part:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return _Part(self._set())
        if character == ".":
            return _Part(partial(_none_of, frozenset("\n")))
        if character in "^$":
            return _Part(partial(_at, character), is_anchor=True)
        count = _COUNTS.match(self._text, self._next - 1)
        if character in "*+?" or (count is not None and count.group() != "{}"):
            raise PatternError(f"nothing to repeat at character {self._next - 1}")
        if character == "\\":
            kind = self._take()
            if kind in "bBAZ":
                return _Part(partial(_at, kind), is_anchor=True)
            members, negated = self._escape(kind)
            return _Part(partial(_none_of if negated else _one_of, members))
        return _Part(partial(_one_of, frozenset(character)))

    def _group(self) -> _Part:
        if self._peek() == "?":
            named = _NAMED_GROUP.match(self._text, self._next)
            if named is not None:
                self._next = named.end()
            elif self._text.startswith("?:", self._next):
                self._next += 2
            else:
                raise PatternError("look-around, flags and special groups are not supported")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"groups are nested deeper than {_MAX_DEPTH} levels")
        inner = self._alternatives()
        if self._peek() != ")":
            raise PatternError("a parenthesis is not closed")
        self._next += 1
        self._depth -= 1
        return inner

    def _escape(self, kind: str) -> tuple[frozenset[str], bool]:
        if kind.lower() in _CLASSES:
            return _CLASSES[kind.lower()], kind.isupper()
        if kind.isalnum():
            raise PatternError(f"the escape \\{kind} is not supported")
        return frozenset(kind), False

    def _set(self) -> Step:
        negated = self._peek() == "^"
        if negated:
            self._next += 1
        members: set[str] = set()
        first = True
        while first or self._peek() != "]":
            first = False
            low = self._set_member()
            if self._peek() == "-" and self._text[self._next + 1 : self._next + 2] not in ("", "]"):
                self._next += 1
                high = self._set_member()
                if len(low) != 1 or len(high) != 1 or min(low) > min(high):
                    raise PatternError("a character range is wrong")
                # Paths are ASCII, so no more of a range can ever match.
                members.update(chr(code) for code in range(ord(min(low)), min(ord(min(high)), 127) + 1))
            else:
                members |= low
        self._next += 1
        return partial(_none_of if negated else _one_of, frozenset(members))

    def _set_member(self) -> frozenset[str]:
        character = self._take()
        if character != "\\":
            return frozenset(character)
        members, negated = self._escape(self._take())
        return frozenset(map(chr, range(128))) - members if negated else members


def _joined(join: Callable[[tuple[Step, ...], str, int], int], parts: Sequence[_Part]) -> _Part:
    steps = tuple(part.step for part in parts)
    return _Part(partial(join, steps), sum(part.num_steps for part in parts), max((part.nested for part in parts), default=0))
