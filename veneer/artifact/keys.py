"""Names of tensors in an adapter file, and the place in the base that each belongs to.

PEFT writes `base_model.model.<module path>.lora_A.weight`; an adapter's own name may stand before `.weight`, and before the
`.bias` of lora_B. A bias of the base is `<module path>.bias`, or `<module path>.base_layer.bias` where a pair is beside it. The
path begins with `model.` when the language model with its head was trained, and without it when the bare model was. Nothing
else is rewritten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from veneer.artifact.description import BaseDescription
from veneer.artifact.families import has_bias
from veneer.artifact.faults import quote
from veneer.artifact.support import refused_tensor

_PREFIX = "base_model.model."
_NAME = r"(?:\.(?!weight$)(?P<adapter>[A-Za-z0-9_-]+))?"
_EMBEDDED = r"(?:\.(?P<embedded>[A-Za-z0-9_-]+))?"
_COPY = re.compile(r"(?P<path>.*?(?:embed_tokens|lm_head))(?:\.base_layer)?\.weight")
# What a name ends with. The first that fits counts: a bias inside a LoRA layer ends like one of the base.
_PARTS = {
    "A": re.compile(rf"(?P<path>.+)\.lora_(?:A{_NAME}\.weight|embedding_A{_EMBEDDED})"),
    "B": re.compile(rf"(?P<path>.+)\.lora_(?:B{_NAME}\.weight|embedding_B{_EMBEDDED})"),
    "magnitude": re.compile(rf"(?P<path>.+)\.lora_magnitude_vector{_NAME}(?:\.weight)?"),
    "lora_bias": re.compile(rf"(?P<path>.+)\.lora_B{_NAME}\.bias"),
    "bias": re.compile(r"(?P<path>.+?)(?:\.base_layer)?\.bias"),
}


@dataclass(frozen=True, slots=True)
class Key:
    """A tensor's name, understood.

    Attributes:
        path: Module path as PEFT sees it, which its patterns match against.
        layer: Decoder layer; the number of layers for embedding and head.
        slice: Index into the base's modules, or its edges.
        part: `A`, `B`, `magnitude` (DoRA), `lora_bias` (of B), `bias` (in place of the base's own) or `copy` (of the base's
            embedding or head).
        adapter: The adapter's own name when the key holds one, else empty.
        has_head: Whether the path is that of a language model with its head.
    """

    path: str
    layer: int
    slice: int
    part: str
    adapter: str
    has_head: bool


class KeyMap:
    """Maps tensor names to the modules of one base. Immutable.

    Args:
        base: The base.
    """

    def __init__(self, base: BaseDescription) -> None:
        self._base = base
        self._places = {
            module.path.format(layer=layer): (layer, index)
            for layer in range(base.num_layers)
            for index, module in enumerate(base.modules)
        } | {module.path: (base.num_layers, index) for index, module in enumerate(base.edges)}

    def parse(self, name: str) -> Key | str:
        """Understands one name.

        Returns:
            The key, or what is wrong with the name.
        """
        part, match = next(((part, found) for part, form in _PARTS.items() if (found := form.fullmatch(name))), ("", None))
        copy = _COPY.fullmatch(name)
        if match is None and copy is not None:
            part, match = "copy", copy
        feature = refused_tensor(name) if part != "copy" else None
        if feature is not None:
            return f"{feature.name} is not supported; {feature.note}"
        if match is None:
            return "is not an A or B of a LoRA pair (…lora_A.weight, …lora_B.weight), nor a magnitude or bias beside one"
        if not name.startswith(_PREFIX):
            return f"must begin with {_PREFIX}, as PEFT writes it"
        path = match["path"].removeprefix(_PREFIX)
        has_head = path in self._places
        place = self._places.get(path if has_head else "model." + path)
        if place is None:
            known = ", ".join(module.name for module in self._base.modules)
            return f"module {quote(path)} is not one of this base, which has layers 0 to {self._base.num_layers - 1} with {known}"
        layer, index = place
        module = self._base.module_at(layer, index)
        if part in ("A", "B") and (module.site == "embed") != ("lora_embedding_" in name):
            return f"is not how PEFT writes a pair of {module.name}"
        if layer == self._base.num_layers and part in ("magnitude", "lora_bias"):
            return f"DoRA and biases are served in the layers only; leave {module.name} out of target_modules"
        if part == "bias" and not has_bias(self._base.family, module.site):
            return f"this base has no bias at {quote(path)} that a trained one could replace"
        names = match.groupdict()
        return Key(
            path=path,
            layer=layer,
            slice=index,
            part=part,
            adapter=names.get("adapter") or names.get("embedded") or "",
            has_head=has_head,
        )

    def paths(self, *, has_head: bool) -> list[str]:
        """Lists the paths of all modules of the base."""
        return [path if has_head else path.removeprefix("model.") for path in self._places]
