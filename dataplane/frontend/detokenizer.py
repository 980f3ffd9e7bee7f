"""Token ids to text as they come: never part of a character, never part of a stop string.

The deltas of one request, put together, are `Tokenizer.decode` of all its ids, up to the first of these: a stop string that was
found, or bytes at the end that are no character (the ids may end in the middle of one). Such bytes are left out: a reader of the
text cannot use them, and the ids carry them.
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
        self._incomplete = b""
        self._num_broken = 0
        self._run = bytearray()
        self._to_strip = pieces.strip_start

    def add(self, id_: int) -> str:
        """Returns the text that became certain with this id; empty while a character is incomplete.

        Bytes that are no character become replacement characters when a character follows them, not before.
        """
        pieces = self._pieces
        if id_ >= len(pieces.raw) or id_ in pieces.skipped:
            return ""
        raw = pieces.raw[id_]
        if not pieces.byte_ids:
            return self._decode(raw)
        if id_ in pieces.byte_ids:
            self._run += raw
            return ""
        return self._strip(self._release(self._end_run() + raw.decode()))

    def finish(self) -> str:
        """Returns what is left of whole characters; bytes that never became one are dropped."""
        if not self._pieces.byte_ids:
            return ""
        run, self._run = bytes(self._run), bytearray()
        try:
            text, _ = codecs.utf_8_decode(run)  # an incomplete character at the end is left out
        except UnicodeDecodeError as error:
            text = run[: error.start].decode()
        return self._strip(self._release(text))

    def _decode(self, raw: bytes) -> str:
        """Decodes as `bytes.decode(errors="replace")` would, but keeps back what is broken or incomplete at the end."""
        data, whole = self._incomplete + raw, []
        while data:
            try:
                text, num_read = codecs.utf_8_decode(data)
            except UnicodeDecodeError as error:
                whole.append(self._release(data[: error.start].decode()))
                self._num_broken += 1
                data = data[error.end :]
                continue
            whole.append(self._release(text))
            data = data[num_read:]
            break
        self._incomplete = data
        return "".join(whole)

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            self._num_broken += len(run)
            return ""

    def _release(self, text: str) -> str:
        """Returns a text after the broken bytes that were kept back; nothing while the text is empty."""
        if not text:
            return ""
        text, self._num_broken = "\ufffd" * self._num_broken + text, 0
        return text

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

    def add(self, text: str, *, counts: bool = True) -> str:
        """Returns the text that is certain to precede every stop string; after one was found (`found`), nothing more.

        Args:
            text: The next piece.
            counts: Whether a stop string that ends in this piece counts; one that only begins in it may count later.
        """
        if self.found:
            return ""
        if not self._stops:
            return text
        num_held = len(self._held)
        text = self._held + text
        # What is kept back may hold a whole stop string that did not count: a match must end in the new piece.
        places = ((stop, text.find(stop, max(0, num_held + 1 - len(stop)))) for stop in self._stops) if counts else ()
        ends = [(start + len(stop), start) for stop, start in places if start >= 0]
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
