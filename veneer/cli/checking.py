"""What an adapter is like: the offline check, the report of a version that was published, and its signature."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from veneer.artifact import ArtifactError, describe_base
from veneer.artifact import check as check_artifact
from veneer.cli.output import note, print_error, print_json, print_table, say
from veneer.cli.signing import check_signature
from veneer.cli.target import Target
from veneer.client import CONFIG_NAME, WEIGHTS_NAME
from veneer.controlplane.v1 import catalog_pb2, signatures_pb2
from veneer.errors import InvalidArgumentError, NotFoundError, Violation
from veneer.reports import report_message
from veneer.signature import BadSignatureError, UntrustedSignatureError
from veneer.signature_file import read_signature

Folder = Annotated[Path, typer.Argument(help=f"PEFT folder with {CONFIG_NAME} and {WEIGHTS_NAME}.", exists=True, file_okay=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_MATCHES = {
    catalog_pb2.BASE_MATCH_NAMED: "named by the configuration",
    catalog_pb2.BASE_MATCH_OTHER_NAME: "the configuration names {}",
    catalog_pb2.BASE_MATCH_NOT_NAMED: "not named by the configuration",
}


def check(
    folder: Folder,
    *,
    base: Annotated[Path, typer.Option(help="Hugging Face folder of the base.", exists=True, file_okay=False)],
    signature: Annotated[
        Path | None,
        typer.Option(help="Its signature; else `model.sig` in the folder, if there is one.", exists=True, dir_okay=False),
    ] = None,
    trust: Annotated[
        list[Path] | None,
        typer.Option(help="PEM of a key or authority whose signature must hold; may be repeated.", exists=True, dir_okay=False),
    ] = None,
    json: _Json = False,
) -> None:
    """Check an adapter on this machine, as publish would; exit status 1 with every fault when it would be refused."""
    description = describe_base(base)
    config, weights = (_file(folder, name) for name in (CONFIG_NAME, WEIGHTS_NAME))
    try:
        report = report_message(check_artifact(config.read_bytes(), weights, description, norms=True).report)
        found = check_signature(folder, signature, trust or [])
        if found is not None:
            report.signature.CopyFrom(found)
    except (ArtifactError, BadSignatureError, UntrustedSignatureError) as error:
        if json:
            violations = [{"field": one.field, "description": one.description} for one in error.violations]
            print_json({"accepted": False, "violations": violations})
        else:
            print_error(error, command="check")
        raise typer.Exit(1) from error
    if json:
        print_json({"accepted": True, "report": report})
        return
    print_report("accepted", report)
    if not trust and report.HasField("signature"):
        note("the signature was held against no key; name those that you trust: --trust FILE")


def report(
    context: typer.Context,
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Adapter of your tenant.")],
    version: Annotated[str, typer.Argument(help="Number, digest, or the beginning of a digest.")],
    *,
    json: _Json = False,
) -> None:
    """Show one version: where it comes from, and what the publish check found."""
    target: Target = context.obj

    async def run() -> list[catalog_pb2.Version]:
        async with target.client() as client:
            return await client.versions(adapter)

    found = _version_of(adapter, version, asyncio.run(run()))
    if json:
        print_json(found)
        return
    print_table(f"{adapter} version {found.number}", ("", ""), _provenance(found))
    print_report("report", found.report)


def attach(
    context: typer.Context,
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Adapter of your tenant.")],
    version: Annotated[str, typer.Argument(help="Number, digest, or the beginning of a digest.")],
    signature: Annotated[Path, typer.Argument(help="Its signature, `model.sig`.", exists=True, dir_okay=False)],
    *,
    json: _Json = False,
) -> None:
    """Add a signature to a version that was published before; it must hold, and is the one that counts from then on."""
    target: Target = context.obj
    data = read_signature(signature.parent, signature)

    async def run() -> signatures_pb2.SignatureReport:
        async with target.client() as client:
            digest = _version_of(adapter, version, await client.versions(adapter)).digest
            return await client.attach_signature(adapter, digest, data)

    found = asyncio.run(run())
    print_json(found) if json else say(signature_text(found))


def _version_of(adapter: str, wanted: str, known: Sequence[catalog_pb2.Version]) -> catalog_pb2.Version:
    """The version with a number, a digest, or the beginning of one.

    Raises:
        NotFoundError: There is none.
        InvalidArgumentError: There are several.
    """
    named = [one for one in known if str(one.number) == wanted.removeprefix("v")]
    found = named or [one for one in known if one.digest.startswith(wanted)]
    if not found:
        raise NotFoundError(f"{adapter} has no version {wanted}; `veneer versions {adapter}` lists them")
    if len(found) > 1:
        raise InvalidArgumentError.of([Violation("version", f"{wanted} is the beginning of {len(found)} digests")])
    return found[0]


def print_report(title: str, report: catalog_pb2.ArtifactReport) -> None:
    """Prints a report as tables: the whole, by module, and the limits."""
    tokens = ", ".join(map(str, report.invocation_tokens))
    rows: list[tuple[str, object]] = [
        ("pairs", f"{report.num_pairs} of {report.num_possible_pairs}" if report.num_possible_pairs else report.num_pairs),
        ("ranks", f"{report.min_rank} – {report.max_rank}"),
        ("rank rows in all", report.total_rank_rows),
        ("modules", ", ".join(report.modules)),
        ("layers", report.num_layers),
        ("type", report.dtype),
        ("scaling", f"{report.min_scaling:g} – {report.max_scaling:g}"),
        ("largest value", f"{report.max_abs:g}"),
        *([("base", _MATCHES[report.base_match].format(report.base_name))] if report.base_match in _MATCHES else []),
        *([("activated by tokens", tokens)] if tokens else []),
        *(("warning", warning) for warning in report.warnings),
    ]
    print_table(title, ("", ""), rows)
    if report.by_module:
        columns = ("module", "site", "pairs", "ranks", "scaling", "largest in A", "in B", "norm of what is added")
        print_table("by module", columns, map(_module_row, report.by_module))
    if report.HasField("probe"):
        print_table("probe", ("", ""), _probe_rows(report.probe))
    if report.HasField("signature"):
        print_table("signature", ("", ""), _signature_rows(report.signature))
    if report.limits:
        rows = [(one.name, f"{one.value:g} of {one.limit:g}") for one in report.limits]
        print_table("limits", ("", ""), rows)


def _module_row(one: catalog_pb2.ModuleReport) -> tuple[object, ...]:
    norm = f"{one.min_norm:.3g} – {one.max_norm:.3g}" if one.HasField("max_norm") else "–"
    return (
        one.module,
        one.site,
        f"{one.num_pairs} of {one.num_layers}",
        f"{one.min_rank} – {one.max_rank}",
        f"{one.min_scaling:g} – {one.max_scaling:g}",
        f"{one.max_abs_a:.3g}",
        f"{one.max_abs_b:.3g}",
        norm,
    )


def _probe_rows(probe: catalog_pb2.ProbeReport) -> Iterator[tuple[str, object]]:
    yield "state", catalog_pb2.ProbeState.Name(probe.state).removeprefix("PROBE_STATE_").lower()
    if probe.node:
        yield "data plane", probe.node
    yield from (("fault", fault) for fault in probe.faults)
    yield from (("warning", warning) for warning in probe.warnings)
    yield "difference from the base", f"{probe.max_difference:.3g} over {probe.num_tokens} tokens of {probe.num_prompts} prompts"
    samples = f"{probe.max_error:.2g} over {probe.num_samples} pairs; {probe.tolerance:g} is allowed"
    yield "difference from the stored files", samples


def signature_text(found: signatures_pb2.SignatureReport) -> str:
    """What was found of a signature, in a line."""
    if found.state != signatures_pb2.SIGNATURE_STATE_VERIFIED:
        return f"warning: the signature was not verified: {found.fault}"
    by = f" ({found.signer})" if found.signer else ""
    return f"signed by {found.key_name}{by}"


def _signature_rows(found: signatures_pb2.SignatureReport) -> Iterator[tuple[str, object]]:
    yield "state", signatures_pb2.SignatureState.Name(found.state).removeprefix("SIGNATURE_STATE_").lower()
    for name, value in (("trusted as", found.key_name), ("key", found.key_id), ("signer", found.signer), ("fault", found.fault)):
        if value:
            yield name, value
    if found.num_other_files:
        yield "other files signed", found.num_other_files


def _provenance(version: catalog_pb2.Version) -> Iterator[tuple[str, object]]:
    yield "digest", version.digest
    yield "base", version.base_digest
    for name, value in (("label", version.label), ("training run", version.training_run), ("data digest", version.data_digest)):
        if value:
            yield name, value
    for name, value in sorted(version.labels.items()):
        yield f"label {name}", value


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise InvalidArgumentError.of([Violation(name, f"is not in {folder}")])
    return path
