"""Records to messages: what crosses the API, in one place."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp

from controlplane.audit import Entry
from controlplane.bases import RegisteredBase
from controlplane.canary_plan import Canary, Step
from controlplane.catalog import Adapter, Alias, Version
from controlplane.changes import Change, ChangeKind
from controlplane.fallback import FallbackPolicy
from controlplane.grants import Grant
from controlplane.keys import Key
from controlplane.limits import TenantLimits, TenantQuotas
from controlplane.nodes import Node
from controlplane.probe_report import ProbeMeasures
from controlplane.quotas import Amounts, Demand
from controlplane.regression import Tally
from controlplane.resolve import Caller, Resolution, Servable
from controlplane.tenants import Tenant
from controlplane.usage import Counts, Used
from controlplane.usage import Entry as UsageEntry
from veneer.artifact import BaseDescription, EdgeDigest, TargetModule
from veneer.controlplane.v1 import bases_pb2, canaries_pb2, catalog_pb2, nodes_pb2, tenants_pb2
from veneer.errors import InvalidArgumentError, Violation
from veneer.reports import report_message
from veneer.signature.messages import report_message as signature_message

_STATES = {
    "READY": catalog_pb2.VERSION_STATE_READY,
    "RETIRED": catalog_pb2.VERSION_STATE_RETIRED,
    "QUARANTINED": catalog_pb2.VERSION_STATE_QUARANTINED,
}
_ROLE_NAMES = {
    tenants_pb2.ROLE_OWNER: "owner",
    tenants_pb2.ROLE_PUBLISHER: "publisher",
    tenants_pb2.ROLE_CALLER: "caller",
    tenants_pb2.ROLE_AUDITOR: "auditor",
}
_CHANGE_KINDS = {
    ChangeKind.VERSION: nodes_pb2.CHANGE_KIND_VERSION,
    ChangeKind.ALIAS: nodes_pb2.CHANGE_KIND_ALIAS,
    ChangeKind.GRANT: nodes_pb2.CHANGE_KIND_GRANT,
    ChangeKind.KEY: nodes_pb2.CHANGE_KIND_KEY,
    ChangeKind.PROBE: nodes_pb2.CHANGE_KIND_PROBE,
    ChangeKind.TRUST: nodes_pb2.CHANGE_KIND_TRUST,
}
_POLICIES = {
    tenants_pb2.FALLBACK_POLICY_ALLOWED: (True, True),
    tenants_pb2.FALLBACK_POLICY_FORBIDDEN: (False, True),
    tenants_pb2.FALLBACK_POLICY_EXACT: (False, False),
}
"""Whether the base may answer, and whether an earlier version may."""
_POLICY_NAMES = {allowed: policy for policy, allowed in _POLICIES.items()}
_ROLES = {name: role for role, name in _ROLE_NAMES.items()}


def timestamp(time: datetime | None) -> Timestamp | None:
    """A time, or nothing for none."""
    if time is None:
        return None
    message = Timestamp()
    message.FromDatetime(time)
    return message


def role_name(role: tenants_pb2.Role.ValueType) -> str:
    """Name of a role as rules and data planes know it."""
    return _ROLE_NAMES[role]


def tenant_message(tenant: Tenant) -> tenants_pb2.Tenant:
    """A tenant as a message."""
    policy = tenant.fallback
    return tenants_pb2.Tenant(
        name=tenant.name,
        fallback=_POLICY_NAMES[policy.by_base, policy.by_previous],
        weight=tenant.weight,
        create_time=timestamp(tenant.create_time),
        default_fallback=tenants_pb2.DefaultFallback.Value(f"DEFAULT_FALLBACK_{policy.default}"),
        limits=limits_message(tenant.limits),
        quotas=quotas_message(tenant.quotas),
        organization=tenant.organization,
    )


def limits_message(limits: TenantLimits) -> tenants_pb2.TenantLimits:
    """A tenant's limits as a message."""
    return tenants_pb2.TenantLimits(**dataclasses.asdict(limits))


def masked(mask: FieldMask, **parts: Any) -> dict[str, dict[str, Any]]:
    """The fields that a request changes, by part: those that its mask names, or all where it names none.

    Args:
        mask: Paths `part.field`; the rules of the request allow no others.
        parts: What the request says, each as a dataclass, by its field of the request.

    Raises:
        InvalidArgumentError: A path names no field.
    """
    whole = {part: dataclasses.asdict(value) for part, value in parts.items()}
    if not mask.paths:
        return whole
    known = {f"{part}.{name}" for part, fields in whole.items() for name in fields}
    if strange := set(mask.paths) - known:  # the rules of the API let a longer path pass
        raise InvalidArgumentError.of([Violation("update_mask", f"{path} is no field") for path in sorted(strange)])
    return {
        part: {name: value for name, value in fields.items() if f"{part}.{name}" in mask.paths} for part, fields in whole.items()
    }


def limits_of(message: tenants_pb2.TenantLimits) -> TenantLimits:
    """A tenant's limits from a message."""
    return TenantLimits(
        max_rank_rows=message.max_rank_rows,
        max_arena_bytes=message.max_arena_bytes,
        max_host_bytes=message.max_host_bytes,
    )


def quotas_message(quotas: TenantQuotas) -> tenants_pb2.TenantQuotas:
    """A tenant's quotas as a message."""
    return tenants_pb2.TenantQuotas(**dataclasses.asdict(quotas))


def quotas_of(message: tenants_pb2.TenantQuotas) -> TenantQuotas:
    """A tenant's quotas from a message."""
    return TenantQuotas(**{field.name: getattr(message, field.name) for field in dataclasses.fields(TenantQuotas)})


def demand_of(message: nodes_pb2.QuotaDemand) -> Demand:
    """What a node says of a tenant from its message."""
    held, used, wanted = (Amounts(one.requests, one.tokens, one.streams) for one in (message.held, message.used, message.wanted))
    return Demand(tenant=message.tenant, ticket=message.ticket, held=held, used=used, wanted=wanted)


def usage_entry(message: nodes_pb2.UsageEntry) -> UsageEntry:
    """What a node reports from its message."""
    return UsageEntry(
        tenant=message.tenant,
        owner=message.owner,
        adapter=message.adapter,
        version=message.version,
        ticket=message.ticket,
        hour=message.hour.ToDatetime(UTC),
        counts=Counts(
            message.requests, message.failed_requests, message.prompt_tokens, message.cached_tokens, message.output_tokens
        ),
    )


def usage_message(used: Used) -> tenants_pb2.Usage:
    """What a tenant used as a message."""
    return tenants_pb2.Usage(
        start_time=timestamp(used.start_time), owner=used.owner, adapter=used.adapter, **dataclasses.asdict(used.counts)
    )


def fallback_policy(
    policy: tenants_pb2.FallbackPolicy.ValueType, default: tenants_pb2.DefaultFallback.ValueType
) -> FallbackPolicy:
    """A policy from its two enums."""
    by_base, by_previous = _POLICIES.get(policy, (True, True))
    named = tenants_pb2.DefaultFallback.Name(default or tenants_pb2.DEFAULT_FALLBACK_NONE).removeprefix("DEFAULT_FALLBACK_")
    return FallbackPolicy(by_base=by_base, by_previous=by_previous, default=named)


def key_message(key: Key) -> tenants_pb2.Key:
    """A key as a message."""
    return tenants_pb2.Key(
        id=key.id,
        tenant=key.tenant,
        roles=[_ROLES[name] for name in key.roles],
        label=key.label,
        create_time=timestamp(key.create_time),
        expire_time=timestamp(key.expire_time),
        revoke_time=timestamp(key.revoke_time),
        successor=key.successor,
        organization=key.organization,
    )


def grant_message(grant: Grant) -> tenants_pb2.Grant:
    """A grant as a message."""
    return tenants_pb2.Grant(
        owner=grant.owner, adapter=grant.adapter, grantee=grant.grantee, create_time=timestamp(grant.create_time)
    )


def audit_message(entry: Entry) -> tenants_pb2.AuditEntry:
    """An entry of the audit log as a message."""
    before, after = ("" if row is None else json.dumps(row, sort_keys=True) for row in (entry.before, entry.after))
    return tenants_pb2.AuditEntry(
        id=entry.id,
        actor=entry.actor,
        action=entry.action.lower(),
        object=entry.object,
        before=before,
        after=after,
        create_time=timestamp(entry.create_time),
    )


_CHAT_CONTENTS = {
    None: bases_pb2.CHAT_CONTENTS_UNSPECIFIED,
    "text": bases_pb2.CHAT_CONTENTS_TEXT,
    "tokens": bases_pb2.CHAT_CONTENTS_TOKENS,
}


def base_message(base: RegisteredBase) -> bases_pb2.Base:
    """A base as a message."""
    known = base.description
    return bases_pb2.Base(
        digest=known.digest,
        name=known.name,
        family=known.family,
        num_layers=known.num_layers,
        modules=[bases_pb2.TargetModule(**dataclasses.asdict(module)) for module in known.modules],
        vocab_size=known.vocab_size,
        max_context=known.max_context,
        known_names=known.known_names,
        ends=None if known.eos_ids is None else bases_pb2.SequenceEnds(token_ids=known.eos_ids),
        edges=None
        if known.edge_digests is None
        else bases_pb2.EdgeDigests(digests=[bases_pb2.EdgeDigest(**dataclasses.asdict(one)) for one in known.edge_digests]),
        chat_contents=_CHAT_CONTENTS[known.chat_contents],
        chat_fault=known.chat_fault,
        create_time=timestamp(base.create_time),
    )


def base_description(base: bases_pb2.Base) -> BaseDescription:
    """A base from its message."""
    modules = [TargetModule(one.path, one.site, one.in_features, one.out_features) for one in base.modules]
    return BaseDescription(
        digest=base.digest,
        name=base.name,
        family=base.family,
        num_layers=base.num_layers,
        modules=tuple(modules),
        vocab_size=base.vocab_size,
        max_context=base.max_context,
        known_names=tuple(base.known_names),
        eos_ids=tuple(base.ends.token_ids) if base.HasField("ends") else None,
        edge_digests=tuple(EdgeDigest(one.site, one.dtype, one.sha256) for one in base.edges.digests)
        if base.HasField("edges")
        else None,
        chat_contents=next(name for name, value in _CHAT_CONTENTS.items() if value == base.chat_contents),
        chat_fault=base.chat_fault if base.HasField("chat_fault") else None,
    )


def alias_message(alias: Alias) -> catalog_pb2.Alias:
    """An alias as a message."""
    arms = [catalog_pb2.Arm(version=arm.version, weight=arm.weight) for arm in alias.arms]
    return catalog_pb2.Alias(
        name=alias.name,
        generation=alias.generation,
        arms=arms,
        update_time=timestamp(alias.update_time),
        frozen=alias.frozen,
    )


def canary_message(canary: Canary) -> canaries_pb2.Canary:
    """A canary as a message."""
    return canaries_pb2.Canary(
        adapter=canary.adapter,
        alias=canary.alias,
        version=canary.version,
        stable_version=canary.stable,
        steps=[
            canaries_pb2.CanaryStep(
                weight_percent=step.weight,
                duration=Duration(nanos=round(step.duration_s % 1 * 1e9), seconds=int(step.duration_s)),
                min_requests=step.min_requests,
            )
            for step in canary.steps
        ],
        step=canary.step,
        generation=canary.alias_generation,
        state=canaries_pb2.CanaryState.Value(f"CANARY_STATE_{canary.state}"),
        reason=canary.reason,
        version_counts=_counts_message(canary.version_tally),
        stable_counts=_counts_message(canary.stable_tally),
        evidence=canary.evidence,
        create_time=timestamp(canary.create_time),
        step_time=timestamp(canary.step_time),
        end_time=timestamp(canary.end_time),
    )


def canary_step(message: canaries_pb2.CanaryStep) -> Step:
    """A step of a schedule from a message."""
    return Step(message.weight_percent, message.duration.ToMilliseconds() / 1000, message.min_requests)


def _counts_message(tally: Tally) -> canaries_pb2.OutcomeCounts:
    return canaries_pb2.OutcomeCounts(ok=tally.ok, failed=tally.failed)


def adapter_message(adapter: Adapter) -> catalog_pb2.Adapter:
    """An adapter as a message."""
    return catalog_pb2.Adapter(
        owner=adapter.owner,
        name=adapter.name,
        aliases=[alias_message(alias) for alias in adapter.aliases],
        num_versions=adapter.num_versions,
        create_time=timestamp(adapter.create_time),
    )


def version_message(version: Version) -> catalog_pb2.Version:
    """A version as a message."""
    return catalog_pb2.Version(
        digest=version.digest,
        owner=version.owner,
        adapter=version.adapter,
        number=version.number,
        base_digest=version.base_digest,
        state=_STATES[version.state],
        size_bytes=version.size_bytes,
        report=_report_message(version),
        label=version.label,
        create_time=timestamp(version.create_time),
        retire_time=timestamp(version.retire_time),
        labels=version.labels,
        training_run=version.training_run,
        data_digest=version.data_digest,
    )


def _report_message(version: Version) -> catalog_pb2.ArtifactReport:
    message = report_message(version.report)
    if version.probe is not None:
        state = catalog_pb2.ProbeState.Value(f"PROBE_STATE_{version.probe.state}")
        fields = dataclasses.asdict(version.probe)
        del fields["take_time_s"]
        message.probe.CopyFrom(catalog_pb2.ProbeReport(**{**fields, "state": state}))
    if version.signature is not None:
        message.signature.CopyFrom(signature_message(version.signature))
    return message


def node_message(node: Node) -> nodes_pb2.Node:
    """A node as a message."""
    return nodes_pb2.Node(
        id=node.id,
        name=node.name,
        base_digest=node.base_digest,
        create_time=timestamp(node.create_time),
        revoke_time=timestamp(node.revoke_time),
    )


def caller_message(caller: Caller) -> nodes_pb2.Caller:
    """A caller as a message."""
    return nodes_pb2.Caller(
        tenant=caller.tenant,
        key_id=caller.key_id,
        roles=caller.roles,
        fallback_allowed=caller.fallback.by_base,
        previous_allowed=caller.fallback.by_previous,
        default_fallback=caller.fallback.default,
        weight=caller.weight,
        cache_salt=caller.cache_salt,
        expire_time=timestamp(caller.expire_time),
        max_priority=caller.max_priority,
        limits=limits_message(caller.limits),
        quotas=quotas_message(caller.quotas),
        ticket=caller.ticket,
    )


def resolution_message(resolution: Resolution) -> nodes_pb2.Resolution:
    """A resolution as a message."""
    return nodes_pb2.Resolution(
        owner=resolution.owner,
        adapter=resolution.adapter,
        alias=resolution.alias,
        generation=resolution.generation,
        arms=map(_servable_message, resolution.arms),
        split_salt=resolution.split_salt,
    )


def _servable_message(version: Servable) -> nodes_pb2.ServableVersion:
    return nodes_pb2.ServableVersion(
        digest=version.digest,
        number=version.number,
        weight=version.weight,
        max_rank=version.max_rank,
        size_bytes=version.size_bytes,
        state=version.state,
        invocation_tokens=version.invocation_tokens,
        previous=None if version.previous is None else _servable_message(version.previous),
        ticket=version.ticket,
        points=version.points,
    )


def measures_of(message: nodes_pb2.ProbeMeasures) -> ProbeMeasures:
    """What a node measured, from a message."""
    return ProbeMeasures(
        fault=message.fault,
        finite=message.finite,
        num_prompts=message.num_prompts,
        num_tokens=message.num_tokens,
        max_difference=message.max_difference,
        num_samples=message.num_samples,
        max_error=message.max_error,
        tolerance=message.tolerance,
    )


def change_message(change: Change) -> nodes_pb2.Change:
    """A change as a message."""
    return nodes_pb2.Change(
        kind=_CHANGE_KINDS[change.kind],
        tenant=change.tenant,
        adapter=change.adapter,
        version=change.version,
        generation=change.generation,
    )
