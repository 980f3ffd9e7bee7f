"""Writes docs/adapters.md from the table of what is served: `python docs/adapters.py` (part of `make format`)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = """# Adapter formats

An adapter is a folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`. It is computed as PEFT computes
it, in batches with any others, or refused at publish with every reason. The tables below are the very ones by which publish,
the node that loads a version, and `veneer check FOLDER --base BASE` decide. Written by `docs/adapters.py`.

Every tensor of a file is applied or is a fault. A field of the configuration that the tables do not know is a warning where it is
null, false or empty, and a fault otherwise.
"""
SECTIONS = {
    "EXACT": "\n## Served\n\n| what | fields | how |\n|---|---|---|\n",
    "NO_EFFECT": "\n## Without effect on serving\n\n| what | fields | why |\n|---|---|---|\n",
    "REFUSED": "\n## Refused by name\n\n| what | fields | what to do |\n|---|---|---|\n",
}
TAIL = """
## How it is proved

[tests/oracle/test_formats.py](../tests/oracle/test_formats.py) lets PEFT write an adapter of every format for four bases
(plain; with biases; with fused projections; with four norms a layer and capped logits), runs all in one batch and each alone,
in every CPU form, and compares every logit with PEFT in float32; the bound is 1e-4. It counts what is in each file and what is
applied, site by site, and plants faults that must be seen. [The decision](adr/0034-gain-and-shift.md) says how DoRA and biases
are computed.
"""


def render() -> str:
    """Returns the text of docs/adapters.md."""
    from veneer.artifact.support import FEATURES

    return (
        HEAD
        + "".join(
            head
            + "".join(
                f"| {feature.name} | {', '.join(f'`{name}`' for name in feature.fields)} | {feature.note} |\n"
                for feature in FEATURES
                if feature.verdict.name == verdict
            )
            for verdict, head in SECTIONS.items()
        )
        + TAIL
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    (ROOT / "docs" / "adapters.md").write_text(render(), encoding="utf-8")
