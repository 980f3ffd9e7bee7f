"""Names of tensors in an adapter file, and the place in the base that each belongs to.

PEFT writes `base_model.model.<module path>.lora_A.weight`; an adapter's own name may stand before `.weight`. The module path
begins with `model.` when the language model with its head was trained, and without it when the bare model was. Nothing else is
rewritten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from veneer.artifact.description import BaseDescription
from veneer.artifact.faults import quote

_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<path>.+)\.lora_(?P<part>[AB])(?:\.(?P<adapter>[A-Za-z0-9_-]+))?\.weight")
_LAYER = re.compile(r"(?:0|[1-9][0-9]{0,3})")

# What the name of a tensor tells about an unsupported feature; the first that fits is named.
_FEATURES = (
    (re.compile(r"lora_magnitude_vector"), "DoRA magnitudes (use_dora)"),
    (re.compile(r"lora_embedding_[AB]|embed_tokens.*\.lora_[AB]"), "LoRA on the token embedding"),
    (re.compile(r"lm_head.*\.lora_[AB]"), "LoRA on lm_head"),
    (re.compile(r"trainable_tokens"), "trained token rows (trainable_token_indices)"),
    (re.compile(r"\.lora_[AB](\.[^.]+)?\.bias$"), "bias inside LoRA layers (lora_bias)"),
    (re.compile(r"\.lora_E|ranknum"), "AdaLoRA"),
    (re.compile(r"\.ia3_l"), "IA3"),
    (re.compile(r"\.hada_"), "LoHa"),
    (re.compile(r"\.lokr_"), "LoKr"),
    (re.compile(r"vera_"), "VeRA"),
    (re.compile(r"prompt_embeddings"), "prompt tuning"),
    (
        re.compile(r"modules_to_save|(embed_tokens|lm_head|norm|layernorm)(\.[^.]+)?\.weight$"),
        "full copies of base tensors (modules_to_save)",
    ),
    (re.compile(r"\.bias$"), "trained bias (bias)"),
)


@dataclass(frozen=True, slots=True)
class Key:
    """A tensor's name, understood.

    Attributes:
        path: Module path as PEFT sees it, which its patterns match against.
        layer: Decoder layer.
        slice: Index into the base's modules.
        part: `A` or `B`.
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
        self._slices: dict[tuple[str, str], int] = {}
        for index, module in enumerate(base.modules):
            before, _, after = module.path.partition("{layer}")
            self._slices[before, after] = index

    def parse(self, name: str) -> Key | str:
        """Understands one name.

        Returns:
            The key, or what is wrong with the name.
        """
        match = _KEY.fullmatch(name)
        if match is None:
            feature = _unsupported(name)
            if feature is not None:
                return f"{feature} is not supported; train LoRA on the linear projections only"
            return "is not an A or B of a LoRA pair (…lora_A.weight, …lora_B.weight)"
        if not name.startswith(_PREFIX):
            return f"must begin with {_PREFIX}, as PEFT writes it"
        path = match["path"].removeprefix(_PREFIX)
        place = self._place(path) or self._place("model." + path)
        if place is None:
            feature = _unsupported(name)
            if feature is not None:
                return f"{feature} is not supported; train LoRA on the linear projections only"
            known = ", ".join(module.name for module in self._base.modules)
            return f"module {quote(path)} is not one of this base, which has layers 0 to {self._base.num_layers - 1} with {known}"
        layer, index = place
        return Key(
            path=path,
            layer=layer,
            slice=index,
            part=match["part"],
            adapter=match["adapter"] or "",
            has_head=self._place(path) is not None,
        )

    def paths(self, *, has_head: bool) -> list[str]:
        """Lists the paths of all modules of the base."""
        whole = [module.path.format(layer=layer) for layer in range(self._base.num_layers) for module in self._base.modules]
        return whole if has_head else [path.removeprefix("model.") for path in whole]

    def _place(self, path: str) -> tuple[int, int] | None:
        for (before, after), index in self._slices.items():
            if path.startswith(before) and path.endswith(after):
                number = path[len(before) : len(path) - len(after)]
                if _LAYER.fullmatch(number) and int(number) < self._base.num_layers:
                    return int(number), index
        return None


def _unsupported(name: str) -> str | None:
    return next((feature for sign, feature in _FEATURES if sign.search(name)), None)
