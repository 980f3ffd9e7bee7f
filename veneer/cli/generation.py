"""`veneer generate`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import typer

from veneer.cli.output import note, print_json_line, short, stream
from veneer.cli.target import Target
from veneer.client import Event, Prompt
from veneer.dataplane.v1 import generation_pb2

_FALLBACK = {
    "default": generation_pb2.FALLBACK_MODE_UNSPECIFIED,
    "none": generation_pb2.FALLBACK_MODE_NONE,
    "not-ready": generation_pb2.FALLBACK_MODE_NOT_READY,
    "any": generation_pb2.FALLBACK_MODE_ANY,
    "previous": generation_pb2.FALLBACK_MODE_PREVIOUS,
    "fail": generation_pb2.FALLBACK_MODE_FAIL,
}
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
    version: Annotated[str | None, typer.Option(help="Digest of a version.")] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", min=1)] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 chooses the likeliest token.", min=0, max=2)] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    top_k: Annotated[int, typer.Option(help="Keep so many of the likeliest tokens; 0 keeps all.", min=0)] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes the choice repeatable.", min=0)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End when this appears; repeat for several.")] = None,
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
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or []
    )

    async def run() -> None:
        async with target.client() as client:
            events = client.generate(
                prompt if raw else _conversation(system, prompt),
                adapter=adapter,
                owner=owner,
                alias=alias,
                version=version,
                sampling=sampling,
                fallback=_FALLBACK[fallback],
                split_unit=unit,
                priority=priority,
            )
            async for event in events:
                _print_json(event) if json else _print(event)

    asyncio.run(run())


def _conversation(system: str, prompt: str) -> Prompt:
    messages = [generation_pb2.ChatMessage(role="system", content=system)] if system else []
    return [*messages, generation_pb2.ChatMessage(role="user", content=prompt)]


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
