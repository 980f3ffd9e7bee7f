"""Grammars of every kind that once took seconds or hundreds of megabytes, and what they hold in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from dataplane.engine.grammar import GrammarCompiler, Lexers


def of_regex(pattern: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def of_schema(schema: dict[str, Any]) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})


HEAVY = {
    "nested counts in a regex": of_regex("(g{500}){800}"),
    "a literal after a choice": of_regex("(a|b)(g{500}){800}"),
    "optional words": of_regex(r"(\w?\s?){900}"),
    "counts that overlap": of_regex("(.{1,300}.?){1,300}"),
    "nested counts in a pattern": of_schema({"type": "string", "pattern": "^(g{500}){800}$"}),
    "a long string": of_schema({"type": "string", "minLength": 20_000, "maxLength": 20_000}),
    "many items": of_schema({"type": "array", "items": {"type": "integer"}, "minItems": 100_000, "maxItems": 1_000_000}),
    "references that double": of_schema(
        {"$ref": "#/$defs/d0", "$defs": {
            **{f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)},
            "d40": {"type": "string"},
        }}
    ),
    "a reference to itself": of_schema({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}),
    "a huge enum": of_schema({"enum": [f"v{i * 7919 % 100_003:05d}" for i in range(4000)]}),
    "many properties": of_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}),
    "alternatives that blow up": of_schema(
        {"anyOf": [{"type": "object", "properties": {f"k{j}": {} for j in range(i % 7)}} for i in range(200)]}
    ),
    "an ambiguous grammar": 'start: e\ne: e e | e e e | "a" | /[a-z ]/',
    "nested repetitions": "start: (((/[a-z]/{0,30}){0,30}){0,30}){0,30}",
    "a million letters": 'start: "a"{1000000}',
    "a text that doubles": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(30)) + '\nr30: "ab"',
    "long alternations": "start: (" + " | ".join(f"T{i}" for i in range(300)) + ")+\n" + "\n".join(
        f"T{i}: /[a-z]{{1,{i + 2}}}[0-9]{{0,{i}}}/" for i in range(300)
    ),
}  # fmt: skip


def main(folder: Path, vocab_size: int) -> None:
    """Prints, by kind, by how many bytes this process grew for it, and how many it is taken to hold."""
    compiler = GrammarCompiler(folder, vocab_size=vocab_size)
    lexers = Lexers(compiler, max_bytes=1 << 40)
    _walk(lexers, of_schema({"type": "object"}))
    told = {}
    for kind, grammar in HEAVY.items():
        resident, taken = _resident(), lexers.num_bytes
        _walk(lexers, grammar)
        told[kind] = (_resident() - resident, lexers.num_bytes - taken)
    print(json.dumps(told))


def _walk(lexers: Lexers, grammar: str) -> None:
    lexer, _ = lexers.open("t", grammar)
    started = time.thread_time()
    matcher = lexer.matcher.deep_copy()
    for _ in range(300):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if matcher.is_error() or not matcher.consume_token(int(mask.nonzero()[0][-1])) or matcher.is_stopped():
            break
    lexers.worked(lexer, time.thread_time() - started)


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
