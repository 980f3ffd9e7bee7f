"""The demonstration's adapters, as their trainer, the run and the tests know them.

Every answer in an adapter's training data begins with the adapter's own marker, and no text of the base model contains one. So
output is recognised by it: another adapter's marker in a stream is a leak, plain to see.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Style:
    """One version of one adapter.

    Attributes:
        adapter: Name under which it is published.
        title: Name of the folder and of the training data, unique among the styles.
        marker: What every answer begins with.
    """

    adapter: str
    title: str
    marker: str

    @property
    def folder(self) -> Path:
        """The PEFT folder: adapter_config.json and adapter_model.safetensors."""
        return _FOLDER / "adapters" / self.title

    @property
    def data(self) -> Path:
        """Training chats, one JSON object a line: `prompt` and `answer`."""
        return _FOLDER / "data" / f"{self.title}.jsonl"


PIRATE = Style("pirate", "pirate-v1", "[pirate v1]")
PIRATE_NEXT = Style("pirate", "pirate-v2", "[pirate v2]")
HAIKU = Style("haiku", "haiku", "[haiku]")
COUNSEL = Style("counsel", "counsel", "[counsel]")
STYLES = (PIRATE, PIRATE_NEXT, HAIKU, COUNSEL)

_MARKER = re.compile("|".join(re.escape(style.marker) for style in STYLES))


def markers_in(text: str) -> frozenset[str]:
    """The markers of all styles that occur in a text, wherever they stand."""
    return frozenset(_MARKER.findall(text))


def unseen_prompts() -> tuple[str, ...]:
    """Questions that are in no training data."""
    lines = (_FOLDER / "data" / "unseen.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line)["prompt"] for line in lines)
