"""Which tokens end a sequence: all those that a model's files name, since tools write them into different ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from veneer.artifact.faults import Faults, quote
from veneer.artifact.strict_json import parse_object


def find_ends(
    *,
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    special_tokens: Mapping[str, Any],
    tokenizer: bytes,
    vocab_size: int,
    faults: Faults,
) -> tuple[int, ...]:
    """Gives the ids that end a sequence, each once, in the order of the files.

    What the model cannot generate is left out: ids at or above `vocab_size`, negative ones (tools write -1 for none), names that
    the tokenizer does not know.

    Args:
        generation: generation_config.json; its `eos_token_id` counts.
        config: config.json; likewise.
        settings: tokenizer_config.json; its `eos_token` counts, a name.
        special_tokens: special_tokens_map.json; its `eos_token` counts where tokenizer_config.json has none.
        tokenizer: tokenizer.json, which gives names their ids.
        vocab_size: Rows of the token embedding.
        faults: Receives what is wrong.
    """
    ids = [*_ids(generation, "generation_config.json", faults), *_ids(config, "config.json", faults)]
    where = "tokenizer_config.json" if settings.get("eos_token") is not None else "special_tokens_map.json"
    name = _name(settings.get("eos_token") or special_tokens.get("eos_token"), where, faults)
    if name and (id_ := _id_of(name, tokenizer, settings, faults)) is not None:
        ids.append(id_)
    return tuple(dict.fromkeys(id_ for id_ in ids if 0 <= id_ < vocab_size))


def _ids(fields: Mapping[str, Any], where: str, faults: Faults) -> list[int]:
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in ids):
        return ids
    faults.add(f"{where} eos_token_id", f"must be a token id or a list of them, not {quote(str(value))}")
    return []


def _name(value: Any, where: str, faults: Faults) -> str:
    name = value.get("content") if isinstance(value, dict) else value
    if name is None or isinstance(name, str):
        return name or ""
    faults.add(f"{where} eos_token", f"must be a text, not {quote(str(value))}")
    return ""


def _id_of(name: str, tokenizer: bytes, settings: Mapping[str, Any], faults: Faults) -> int | None:
    """Looks a token up as tokenizers do: among the added ones, then in the vocabulary, a table or pieces in their order."""
    fields = parse_object(tokenizer, "tokenizer.json", max_depth=64, faults=faults) or {}
    added = [(token.get("content"), token.get("id")) for token in _objects(fields.get("added_tokens"))]
    model = fields.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        added.append((name, vocab.get(name)))
    elif isinstance(vocab, list):
        added += [(piece[0], place) for place, piece in enumerate(vocab) if isinstance(piece, list) and piece]
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        added += [
            (token.get("content"), int(id_)) for id_, token in decoder.items() if isinstance(token, dict) and id_.isdecimal()
        ]
    return next((id_ for content, id_ in added if content == name and isinstance(id_, int)), None)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
