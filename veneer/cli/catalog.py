"""What tenants do with their catalogue: publish, list, move aliases, retire, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from veneer.artifact import folder_name
from veneer.cli.checking import Folder, signature_text
from veneer.cli.output import error_console, note, print_json, print_table, say, short, size, when
from veneer.cli.target import Target
from veneer.client import Client
from veneer.controlplane.v1 import catalog_pb2
from veneer.errors import InvalidArgumentError, NotFoundError, Violation
from veneer.origin import Origin

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AdapterName = Annotated[str, typer.Argument(metavar="ADAPTER", help="Adapter of your tenant.")]
AliasName = Annotated[str, typer.Option("--alias", help="Name of the alias.")]
Expected = Annotated[int | None, typer.Option("--expect", help="Move it only if its generation is still this.", min=0)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and say what would be done, but do nothing.")]
_VERSION_HELP = "Number, digest, or the beginning of a digest."


def publish(
    context: typer.Context,
    folder: Folder,
    *,
    adapter: Annotated[
        str,
        typer.Option(help="Name of the adapter; else the folder's, or the repository's of a snapshot of the Hugging Face Hub."),
    ] = "",
    base: Annotated[str, typer.Option(help="Digest or name of the base; else the only one there is.")] = "",
    alias: Annotated[str, typer.Option(help="Alias to point at it; else none moves, but a first version becomes `stable`.")] = "",
    label: Annotated[str, typer.Option(help="Free text, up to 200 characters.")] = "",
    labels: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A label; may be repeated, up to 32.")] = None,
    training_run: Annotated[str, typer.Option(help="The run that trained it, up to 200 characters.")] = "",
    data_digest: Annotated[str, typer.Option(help="SHA-256 of what it was trained on, 64 lower-case hex digits.")] = "",
    signature: Annotated[
        Path | None,
        typer.Option(help="Its signature; else `model.sig` in the folder, if there is one.", exists=True, dir_okay=False),
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Have a data plane run it before the alias moves.")] = False,
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="Files that are a version of the adapter already: say which, and end well.")
    ] = False,
    request_id: Annotated[str, typer.Option(help="Your own identifier: repeating a publish with it changes nothing.")] = "",
    json: Json = False,
) -> None:
    """Publish an adapter as a new version; it can be served seconds later."""
    target: Target = context.obj
    name = adapter or folder_name(folder).rpartition("/")[2].lower()
    origin = Origin(labels=_read_labels(labels or []), training_run=training_run, data_digest=data_digest)

    async def run(progress: Progress) -> catalog_pb2.PublishResponse:
        task = progress.add_task(f"publishing {name}", total=None)
        async with target.client() as client:
            return await client.publish(
                folder,
                adapter=name,
                base=base or await _only_base(client, target),
                alias=alias,
                label=label,
                origin=origin,
                signature=signature,
                probe=probe,
                exist_ok=exist_ok,
                request_id=request_id,
                progress=lambda sent, total: progress.update(task, completed=sent, total=total),
            )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=error_console, transient=True) as progress:
        response = asyncio.run(run(progress))
    if json:
        print_json(response)
        return
    version = response.version
    say(f"published {version.owner}/{version.adapter} version {version.number}: {version.digest}")
    if response.HasField("alias"):
        say(f"alias {response.alias.name} points at it (generation {response.alias.generation})")
    else:
        note(f"no alias was moved; to serve it: veneer alias {version.adapter} {version.number}")
    if version.report.HasField("signature"):
        note(signature_text(version.report.signature))
    for warning in (*version.report.warnings, *version.report.probe.warnings):
        note(f"warning: {warning}")


def adapters(context: typer.Context, *, json: Json = False) -> None:
    """List your tenant's adapters and where their aliases point."""
    target: Target = context.obj

    async def run() -> list[catalog_pb2.Adapter]:
        async with target.client() as client:
            return await client.adapters()

    found = asyncio.run(run())
    if json:
        print_json(found)
        return
    rows = [
        (one.name, one.num_versions, "; ".join(_alias_text(alias) for alias in one.aliases), when(one.create_time))
        for one in found
    ]
    print_table("adapters", ("name", "versions", "aliases", "created"), rows)


def versions(context: typer.Context, adapter: AdapterName, *, json: Json = False) -> None:
    """List an adapter's versions, newest first."""
    target: Target = context.obj

    async def run() -> list[catalog_pb2.Version]:
        async with target.client() as client:
            return await client.versions(adapter)

    found = asyncio.run(run())
    if json:
        print_json(found)
        return
    rows = [
        (
            one.number,
            short(one.digest),
            catalog_pb2.VersionState.Name(one.state).removeprefix("VERSION_STATE_").lower(),
            one.report.max_rank,
            ", ".join(one.report.modules),
            size(one.size_bytes),
            one.label,
            one.training_run,
            when(one.create_time),
        )
        for one in found
    ]
    print_table(
        f"versions of {adapter}",
        ("no.", "digest", "state", "rank", "modules", "size", "label", "training run", "published"),
        rows,
    )


def alias(
    context: typer.Context,
    adapter: AdapterName,
    version: Annotated[str, typer.Argument(help=_VERSION_HELP)],
    *,
    alias: AliasName = "stable",
    expected: Expected = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Point an alias at one version."""
    moved = _set_alias(context.obj, adapter, [(version, 1)], alias=alias, expected=expected, dry_run=dry_run)
    print_json(moved) if json else say(_alias_text(moved, dry_run=dry_run))


def split(
    context: typer.Context,
    adapter: AdapterName,
    arms: Annotated[list[str], typer.Argument(metavar="VERSION=WEIGHT...", help="E.g. 1=90 2=10.")],
    *,
    alias: AliasName = "stable",
    expected: Expected = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Split an alias's traffic over versions by weight; a unit (`generate --unit`) always gets the same arm."""
    moved = _set_alias(context.obj, adapter, list(map(_read_arm, arms)), alias=alias, expected=expected, dry_run=dry_run)
    print_json(moved) if json else say(_alias_text(moved, dry_run=dry_run))


def rollback(
    context: typer.Context,
    adapter: AdapterName,
    *,
    to: Annotated[str, typer.Option(help=f"{_VERSION_HELP} Else the one that it served alone before its last move.")] = "",
    alias: AliasName = "stable",
    expected: Expected = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Point an alias back at the version that it served before."""
    target: Target = context.obj

    async def run() -> catalog_pb2.Alias:
        async with target.client() as client:
            version = (await find_versions(client, adapter, [to]))[0] if to else ""
            return await client.rollback(adapter, alias=alias, version=version, expected_generation=expected, dry_run=dry_run)

    moved = asyncio.run(run())
    print_json(moved) if json else say(f"{'would be ' if dry_run else ''}rolled back: {_alias_text(moved)}")


def retire(
    context: typer.Context,
    adapter: AdapterName,
    version: Annotated[str, typer.Argument(help=_VERSION_HELP)],
    *,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """End a version: nothing new is admitted to it, running requests finish on it."""
    target: Target = context.obj

    async def run() -> catalog_pb2.Version:
        async with target.client() as client:
            [digest] = await find_versions(client, adapter, [version])
            return await client.retire(adapter, digest, dry_run=dry_run)

    retired = asyncio.run(run())
    done = "would retire" if dry_run else "retired"
    print_json(retired) if json else say(f"{done} {retired.adapter} version {retired.number}")


def promote(
    context: typer.Context,
    adapter: AdapterName,
    *,
    source: Annotated[str, typer.Option("--from", help="Alias whose version is promoted, e.g. `canary`.")] = "",
    version: Annotated[str, typer.Option(help=f"{_VERSION_HELP} An arm of the alias.")] = "",
    alias: AliasName = "stable",
    expected: Expected = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Give all of an alias's traffic to what another alias serves, or to one of its arms."""
    target: Target = context.obj

    async def run() -> catalog_pb2.Alias:
        async with target.client() as client:
            digest = (await find_versions(client, adapter, [version]))[0] if version else ""
            return await client.promote(
                adapter, alias=alias, source=source, version=digest, expected_generation=expected, dry_run=dry_run
            )

    moved = asyncio.run(run())
    print_json(moved) if json else say(f"{'would be ' if dry_run else ''}promoted: {_alias_text(moved)}")


def freeze(context: typer.Context, adapter: AdapterName, *, alias: AliasName = "stable", json: Json = False) -> None:
    """Forbid every move of an alias until it is unfrozen."""
    held = _freeze(context.obj, adapter, alias=alias, frozen=True)
    print_json(held) if json else say(f"{held.name} is frozen")


def unfreeze(context: typer.Context, adapter: AdapterName, *, alias: AliasName = "stable", json: Json = False) -> None:
    """Allow moves of an alias again."""
    free = _freeze(context.obj, adapter, alias=alias, frozen=False)
    print_json(free) if json else say(f"{free.name} is free to move")


def delete(
    context: typer.Context,
    adapter: AdapterName,
    version: Annotated[str, typer.Argument(help=f"{_VERSION_HELP} Without it, the adapter is deleted.")] = "",
    *,
    force: Annotated[bool, typer.Option("--force", help="Move aliases that point there off it.")] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Delete a version, or an adapter with all its versions; the files go once no node may read them."""
    target: Target = context.obj

    async def run() -> catalog_pb2.DeleteAdapterResponse | catalog_pb2.DeleteVersionResponse:
        async with target.client() as client:
            if not version:
                return await client.delete_adapter(adapter, force=force, dry_run=dry_run)
            [digest] = await find_versions(client, adapter, [version])
            return await client.delete_version(adapter, digest, force=force, dry_run=dry_run)

    gone = asyncio.run(run())
    if json:
        print_json(gone)
        return
    if isinstance(gone, catalog_pb2.DeleteAdapterResponse):
        what = f"{adapter} with {gone.num_versions} versions"
    else:
        what = f"{adapter} version {gone.version.number}"
    say(f"{'would delete' if dry_run else 'deleted'} {what}")
    for one in gone.aliases:
        note(_alias_text(one) if one.arms else f"{one.name} points at nothing")


def _freeze(target: Target, adapter: str, *, alias: str, frozen: bool) -> catalog_pb2.Alias:
    async def run() -> catalog_pb2.Alias:
        async with target.client() as client:
            return await client.freeze(adapter, alias=alias, frozen=frozen)

    return asyncio.run(run())


def _set_alias(
    target: Target, adapter: str, arms: list[tuple[str, int]], *, alias: str, expected: int | None, dry_run: bool
) -> catalog_pb2.Alias:
    async def run() -> catalog_pb2.Alias:
        async with target.client() as client:
            digests = await find_versions(client, adapter, [version for version, _ in arms])
            weights = dict(zip(digests, (weight for _, weight in arms), strict=True))
            if len(weights) < len(arms):
                raise InvalidArgumentError.of([Violation("arms", "a version is named twice")])
            return await client.set_alias(adapter, weights, alias=alias, expected_generation=expected, dry_run=dry_run)

    return asyncio.run(run())


async def find_versions(client: Client, adapter: str, wanted: Iterable[str]) -> list[str]:
    """Digests of versions that are named by number, digest, or the beginning of a digest."""
    known = await client.versions(adapter)
    digests = []
    for name in wanted:
        number = name.removeprefix("v")
        found = [one.digest for one in known if str(one.number) == number] or [
            one.digest for one in known if one.digest.startswith(name)
        ]
        if not found:
            raise NotFoundError(f"{adapter} has no version {name}; `veneer versions {adapter}` lists them")
        if len(found) > 1:
            raise InvalidArgumentError.of([Violation("version", f"{name} is the beginning of {len(found)} digests")])
        digests.append(found[0])
    return digests


async def _only_base(client: Client, target: Target) -> str:
    state = target.state
    if state is not None:
        return state.base_digest
    known = await client.bases()
    if len(known) != 1:
        names = ", ".join(base.name for base in known) or "none: `veneer base add` registers one"
        raise InvalidArgumentError.of([Violation("--base", f"name the base; there are {names}")])
    return known[0].digest


def _read_labels(texts: Iterable[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise InvalidArgumentError.of([Violation("--labels", f"{text!r} is not NAME=VALUE")])
        if name in labels:
            raise InvalidArgumentError.of([Violation("--labels", f"{name!r} is given twice")])
        labels[name] = value
    return labels


def _read_arm(arm: str) -> tuple[str, int]:
    version, separator, weight = arm.rpartition("=")
    if not separator or not weight.isdecimal() or not 1 <= int(weight) <= 10_000:
        raise InvalidArgumentError.of([Violation(arm, "is not VERSION=WEIGHT with a weight of 1 to 10000")])
    return version, int(weight)


def _alias_text(alias: catalog_pb2.Alias, *, dry_run: bool = False) -> str:
    total = sum(arm.weight for arm in alias.arms)
    arms = ", ".join(f"{short(arm.version)} {100 * arm.weight / total:.4g} %" for arm in alias.arms)
    return f"{alias.name} {'would be ' if dry_run else ''}→ {arms} (generation {alias.generation})"
