"""`veneer generate`."""

from __future__ import annotations

import asyncio
import json as json_text
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from veneer.answer import Event
from veneer.cli.catalog import find_versions
from veneer.cli.output import note, print_json_line, short, stream
from veneer.cli.target import Target
from veneer.client import Client
from veneer.dataplane.v1 import generation_pb2
from veneer.errors import InvalidArgumentError, Violation
from veneer.generation_calls import GenerateOptions

_FALLBACK = {
    "default": generation_pb2.FALLBACK_MODE_UNSPECIFIED,
    "none": generation_pb2.FALLBACK_MODE_NONE,
    "not-ready": generation_pb2.FALLBACK_MODE_NOT_READY,
    "any": generation_pb2.FALLBACK_MODE_ANY,
    "previous": generation_pb2.FALLBACK_MODE_PREVIOUS,
    "fail": generation_pb2.FALLBACK_MODE_FAIL,
}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_SCHEMA_BYTES, _MAX_REGEX_BYTES, _MAX_GRAMMAR_BYTES = 65_536, 1024, 16_384  # those of the API
_FALLBACK_HELP = (
    "When the version cannot be had in time: wait for it (none), the base (not-ready; any: for unknown adapters too), "
    "the version before it (previous), an error at once (fail); default is what the tenant has set."
)


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    *,
    adapter: Annotated[str, typer.Option(help="Adapter; else the base answers.")] = "",
    owner: Annotated[str, typer.Option(help="Tenant that owns it; else your own.")] = "",
    alias: Annotated[str | None, typer.Option(help="Alias; else `stable`.")] = None,
    version: Annotated[str | None, typer.Option(help="Version: number, digest, or the beginning of a digest.")] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 chooses the likeliest token.", min=0, max=2)] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    top_k: Annotated[int, typer.Option(help="Keep so many of the likeliest tokens; 0 keeps all.", min=0)] = 0,
    seed: Annotated[
        int | None,
        typer.Option(help="Makes the choice repeatable; exactly so where the data plane is set to batch_invariant.", min=0),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End when this appears; repeat for several.")] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE|JSON", help="The answer is JSON that this schema allows; a file, or the schema itself."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="The answer matches this regular expression from its first to its last letter.")
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option(help="The answer is in the language of this grammar, Lark or GBNF.", exists=True, dir_okay=False),
    ] = None,
    fallback: Annotated[
        Literal["default", "none", "not-ready", "any", "previous", "fail"], typer.Option(help=_FALLBACK_HELP)
    ] = "default",
    unit: Annotated[str, typer.Option(help="Unit of a traffic split, e.g. an end user.")] = "",
    priority: Annotated[int, typer.Option(help="Place among your own waiting requests.", min=-100, max=100)] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print each event as a line of JSON.")] = False,
) -> None:
    """Stream a completion as it comes; what served it goes to standard error."""
    target: Target = context.obj
    sampling = generation_pb2.SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or [],
        structured_outputs=read_constraint(json_schema=json_schema, regex=regex, grammar=grammar),
    )

    async def run() -> None:
        async with target.client() as client:
            digest = None if version is None else await _digest(client, adapter, owner, version)
            options = GenerateOptions(
                adapter=adapter,
                owner=owner,
                alias=alias,
                version=digest,
                sampling=sampling,
                fallback=_FALLBACK[fallback],
                split_unit=unit,
                priority=priority,
            )
            asked = client.stream_complete(prompt, **options) if raw else client.stream_chat(_messages(system, prompt), **options)
            async for event in asked:
                _print_json(event) if json else _print(event)

    asyncio.run(run())


def read_constraint(
    *, json_schema: str | None, regex: str | None, grammar: Path | None
) -> generation_pb2.StructuredOutputs | None:
    """What the answer must match, as the options say it; None: anything.

    Raises:
        InvalidArgumentError: Two of them are given, or one is empty, too long or no JSON schema.
        OSError: A file cannot be read.
    """
    options = {"--json-schema": json_schema, "--regex": regex, "--grammar": grammar}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise InvalidArgumentError.of([Violation(" and ".join(given), "cannot be given together: name one")])
    if json_schema is not None:
        return generation_pb2.StructuredOutputs(json=_sized("--json-schema", _schema(json_schema), _MAX_SCHEMA_BYTES))
    if regex is not None:
        return generation_pb2.StructuredOutputs(regex=_sized("--regex", regex, _MAX_REGEX_BYTES))
    if grammar is not None:
        return generation_pb2.StructuredOutputs(grammar=_sized("--grammar", _text(grammar, "--grammar"), _MAX_GRAMMAR_BYTES))
    return None


def _schema(given: str) -> str:
    """The schema's text, from a file unless it is JSON by itself."""
    is_json = given.lstrip().startswith("{") or given.strip() in ("true", "false")
    if not is_json and not Path(given).is_file():
        raise InvalidArgumentError.of([Violation("--json-schema", f"{given!r} is neither a file nor a JSON object")])
    text = given if is_json else _text(Path(given), "--json-schema")
    try:
        schema = json_text.loads(text)
    except ValueError as error:
        raise InvalidArgumentError.of([Violation("--json-schema", f"is no JSON: {error}")]) from error
    if not isinstance(schema, (dict, bool)):
        raise InvalidArgumentError.of([Violation("--json-schema", "is no schema: that is a JSON object, true or false")])
    return text


def _text(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError.of([Violation(option, f"{path} is not text in UTF-8")]) from error


def _sized(option: str, text: str, limit: int) -> str:
    size_bytes = len(text.encode(errors="surrogateescape"))
    if not 1 <= size_bytes <= limit:
        raise InvalidArgumentError.of([Violation(option, f"has {size_bytes} bytes; 1 to {limit:,} are allowed")])
    return text


async def _digest(client: Client, adapter: str, owner: str, version: str) -> str:
    """The digest of a version that is named by number, digest, or the beginning of a digest.

    Raises:
        InvalidArgumentError: There is no adapter to look in, or it is another tenant's, whose versions cannot be listed.
        NotFoundError: There is no such version.
    """
    if _DIGEST.fullmatch(version):
        return version
    if not adapter:
        raise InvalidArgumentError.of([Violation("--version", f"{version} is a version of which adapter? Name it: --adapter")])
    if owner:
        raise InvalidArgumentError.of(
            [Violation("--version", "give the whole digest: only the owner can list an adapter's versions")]
        )
    [digest] = await find_versions(client, adapter, [version])
    return digest


def _messages(system: str, prompt: str) -> list[tuple[str, str]]:
    return [*([("system", system)] if system else []), ("user", prompt)]


def _print_json(event: Event) -> None:
    kind = event.DESCRIPTOR.name.lower()
    print_json_line({kind: event})


def _print(event: Event) -> None:
    if isinstance(event, generation_pb2.Chunk):
        stream(event.text)
    elif isinstance(event, generation_pb2.Served):
        note(_served_text(event))
    elif isinstance(event, generation_pb2.Finish):
        stream("\n")
        reason = generation_pb2.FinishReason.Name(event.reason).removeprefix("FINISH_REASON_").lower()
        note(f"({reason}: {event.prompt_tokens} tokens in, {event.completion_tokens} out)")


def _served_text(served: generation_pb2.Served) -> str:
    reason = generation_pb2.FallbackReason.Name(served.fallback_reason).removeprefix("FALLBACK_REASON_").lower().replace("_", " ")
    if not served.version:
        return f"[base, in place of the adapter: {reason}]" if served.fallback else "[base]"
    arm = f", arm {served.arm}{' (sticky)' if served.sticky else ''}" if served.alias else ""
    instead = f", in place of a later one: {reason}" if served.fallback else ""
    return f"[{served.owner}/{served.adapter} version {served.version_number} {short(served.version)}{arm}{instead}]"
