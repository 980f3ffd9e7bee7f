"""Token ids to text as they come: never part of a character, never part of a stop string.

The deltas of one request, put together, are `Tokenizer.decode` of all its ids (up to a stop string, if one was found).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from dataplane.frontend.tokenizer import Pieces


class Detokenizer:
    """Turns the ids of one request into text. Owned by that request's stream; not for several tasks.

    Args:
        pieces: What each id adds to the text.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()
        self._to_strip = pieces.strip_start

    def add(self, id_: int) -> str:
        """Returns the text that became certain with this id; empty while a character is incomplete."""
        pieces = self._pieces
        if id_ >= len(pieces.raw) or id_ in pieces.skipped:
            return ""
        raw = pieces.raw[id_]
        if not pieces.byte_ids:
            return self._characters.decode(raw)
        if id_ in pieces.byte_ids:
            self._run += raw
            return ""
        return self._strip(self._end_run() + raw.decode())

    def finish(self) -> str:
        """Returns what is left: replacement characters for bytes that never became one."""
        if self._pieces.byte_ids:
            return self._strip(self._end_run())
        return self._characters.decode(b"", final=True)

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        if not self._to_strip or not text:
            return text
        stripped = text[: self._to_strip].lstrip(" ") + text[self._to_strip :]
        taken = len(text) - len(stripped)
        self._to_strip = self._to_strip - taken if taken == len(text) else 0
        return stripped


class StopStrings:
    """Finds the first stop string in a text that comes in pieces. Owned by one request's stream.

    The one that ends first in the text wins, the longer of two that end together: the result does not depend on the pieces.

    Args:
        stops: Stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Returns the text that is certain to precede every stop string; after one was found (`found`), nothing more."""
        if self.found:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return text[: min(ends)[1]]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Returns the text that was held back and is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest end of `text` that is a proper beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
