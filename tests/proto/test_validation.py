"""The declarative rules of the API: all of them compile, each kind refuses a bad value, and ordinary messages pass."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import protovalidate
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp

from buf.validate import validate_pb2
from veneer.controlplane.v1 import bases_pb2, catalog_pb2, nodes_pb2, organizations_pb2, tenants_pb2
from veneer.dataplane.v1 import admin_pb2, generation_pb2

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "0123456789abcdef" * 4
UUID = "123e4567-e89b-42d3-a456-426614174000"
OUTCOME = nodes_pb2.ArmOutcomes(owner="acme", adapter="tone", alias="stable", version=DIGEST)


def api_files() -> list[FileDescriptor]:
    sources = sorted((ROOT / "proto" / "veneer").rglob("*.proto"))
    names = [source.relative_to(ROOT / "proto").with_suffix("").as_posix().replace("/", ".") for source in sources]
    return [importlib.import_module(f"{name}_pb2").DESCRIPTOR for name in names]


def api_messages() -> list[Descriptor]:
    return [message for file in api_files() for message in file.message_types_by_name.values()]


def broken(message: Message) -> set[tuple[str, str]]:
    """Pairs of field and rule that the message breaks."""
    found = set()
    for violation in protovalidate.collect_violations(message):
        path = ".".join(element.field_name for element in violation.proto.field.elements)
        found.add((path, violation.proto.rule_id))
    return found


def base(**changes: object) -> bases_pb2.Base:
    module = bases_pb2.TargetModule(path="model.layers.{layer}.mlp.down_proj", site="down", in_features=8, out_features=8)
    fields = {
        "digest": DIGEST,
        "name": "tiny",
        "family": "llama",
        "num_layers": 2,
        "modules": [module],
        "vocab_size": 16,
        "max_context": 64,
    }
    return bases_pb2.Base(**{**fields, **changes})


def request(**changes: object) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(**{"text": "Hello", **changes})


def sampling(**changes: object) -> generation_pb2.GenerateRequest:
    return request(sampling=generation_pb2.SamplingParams(**changes))


def part(**changes: object) -> catalog_pb2.PublishPart:
    return catalog_pb2.PublishPart(**{"file": catalog_pb2.ADAPTER_FILE_CONFIG, "data": b"{}", **changes})


def test_there_are_messages_of_every_file() -> None:
    assert len(api_files()) == len(list((ROOT / "proto" / "veneer").rglob("*.proto")))
    assert len(api_messages()) > 80


@pytest.mark.parametrize("descriptor", api_messages(), ids=lambda descriptor: descriptor.full_name)
def test_the_rules_of_a_message_compile(descriptor: Descriptor) -> None:
    """Rules are compiled when a message is first met, set fields or not: a bad rule would fail a caller's first call."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if field.message_type is not None and not field.is_repeated and field.containing_oneof is None:
            getattr(message, field.name).SetInParent()

    protovalidate.collect_violations(message)


@pytest.mark.parametrize(
    "message",
    [
        base(),
        base(known_names=["HuggingFaceTB/tiny"]),
        base(ends=bases_pb2.SequenceEnds()),
        base(chat_contents=bases_pb2.CHAT_CONTENTS_TOKENS, chat_fault="é" * 400),
        bases_pb2.RegisterBaseRequest(base=base()),
        tenants_pb2.Tenant(name="acme", weight=0),
        tenants_pb2.CreateKeyRequest(roles=[tenants_pb2.ROLE_OWNER, tenants_pb2.ROLE_CALLER], lifetime=Duration(seconds=1)),
        tenants_pb2.CreateKeyRequest(tenant="acme", roles=[tenants_pb2.ROLE_CALLER]),
        tenants_pb2.RevokeKeyRequest(id=UUID),
        organizations_pb2.Organization(name="acme-group"),
        organizations_pb2.CreateOrganizationKeyRequest(roles=[tenants_pb2.ROLE_OWNER, tenants_pb2.ROLE_AUDITOR]),
        catalog_pb2.PublishRequest(header=catalog_pb2.PublishHeader(adapter="support.v2_x-y", base="tiny", request_id="1")),
        catalog_pb2.PublishRequest(part=part(data=b"x" * 1048576)),
        catalog_pb2.SetAliasRequest(adapter="a", arms=[catalog_pb2.Arm(version=DIGEST, weight=1)]),
        catalog_pb2.RollbackRequest(adapter="a"),
        catalog_pb2.RollbackRequest(adapter="a", version=DIGEST),
        nodes_pb2.ResolveRequest(key_digest=b"k" * 32, target=nodes_pb2.AdapterTarget(), base_digest=DIGEST),
        nodes_pb2.ReportVersionRequest(version=DIGEST, fault=nodes_pb2.VERSION_FAULT_CORRUPT),
        request(),
        request(adapter=generation_pb2.AdapterRef()),
        request(adapter=generation_pb2.AdapterRef(adapter="a", owner="acme", alias="")),
        sampling(),
        sampling(max_tokens=1, temperature=0, top_p=1, min_p=0, repetition_penalty=10, seed=0, stop=["é"]),
        admin_pb2.DrainRequest(),
        admin_pb2.DrainRequest(grace=Duration()),
    ],
    ids=lambda message: type(message).__name__,
)
def test_an_ordinary_message_passes(message: Message) -> None:
    assert broken(message) == set()


@pytest.mark.parametrize(
    ("message", "field", "rule"),
    [
        # strings
        (base(digest=DIGEST.upper()), "digest", "string.pattern"),
        (base(digest=DIGEST + "\n"), "digest", "string.pattern"),
        (base(name=""), "name", "string.min_len"),
        (base(name="n" * 201), "name", "string.max_len"),
        (bases_pb2.TargetModule(path="model.q_proj", site="qkv", in_features=8, out_features=8), "path", "string.pattern"),
        (bases_pb2.TargetModule(path="{layer}.{x}", site="qkv", in_features=8, out_features=8), "path", "string.pattern"),
        (tenants_pb2.Tenant(name="-acme"), "name", "string.pattern"),
        (tenants_pb2.Tenant(name="a" * 64), "name", "string.pattern"),
        (tenants_pb2.CreateGrantRequest(adapter="a", grantee="Friend"), "grantee", "string.pattern"),
        (tenants_pb2.RevokeKeyRequest(id="1"), "id", "string.uuid"),
        (organizations_pb2.Organization(name="acme--group"), "name", "string.pattern"),
        (organizations_pb2.Organization(name="a" * 31), "name", "string.max_len"),
        (catalog_pb2.PublishHeader(adapter="A", base="b", request_id="1"), "adapter", "string.pattern"),
        (catalog_pb2.PublishHeader(adapter="a/../b", base="b", request_id="1"), "adapter", "string.pattern"),
        (generation_pb2.ChatMessage(role="tool"), "role", "string.in"),
        (generation_pb2.ChatMessage(role="user", content="é" * 2097153), "content", "string.max_bytes"),
        (sampling(stop=[""]), "sampling.stop", "string.min_bytes"),
        (sampling(stop=["x" * 129]), "sampling.stop", "string.max_bytes"),
        (request(adapter=generation_pb2.AdapterRef(adapter="a", version="x")), "adapter.version", "string.pattern"),
        # bytes
        (part(data=b""), "data", "bytes.min_len"),
        (part(data=b"x" * 1048577), "data", "bytes.max_len"),
        (nodes_pb2.IntrospectRequest(key_digest=b"short"), "key_digest", "bytes.len"),
        (nodes_pb2.GrantBlobsRequest(version=DIGEST, operator_key_digest=b"short"), "operator_key_digest", "bytes.len"),
        # whole numbers
        (base(vocab_size=0), "vocab_size", "uint32.gt"),
        (base(num_layers=1025), "num_layers", "uint32.gt_lte"),
        (tenants_pb2.ListTenantsRequest(page_size=1001), "page_size", "uint32.lte"),
        (catalog_pb2.Arm(version=DIGEST, weight=0), "weight", "uint32.gte_lte"),
        (sampling(logit_bias=dict.fromkeys(range(301), 1.0)), "sampling.logit_bias", "map.max_pairs"),
        (sampling(max_tokens=0), "sampling.max_tokens", "uint32.gte"),
        # broken numbers; not a number is none of them
        (sampling(temperature=-0.1), "sampling.temperature", "float.gte_lte"),
        (sampling(temperature=math.inf), "sampling.temperature", "float.finite"),
        (sampling(temperature=math.nan), "sampling.temperature", "float.finite"),
        (sampling(top_p=0), "sampling.top_p", "float.gt_lte"),
        (sampling(min_p=1.5), "sampling.min_p", "float.gte_lte"),
        (sampling(repetition_penalty=0), "sampling.repetition_penalty", "float.gt_lte"),
        (tenants_pb2.TenantLimits(max_arena_bytes=1 << 60), "max_arena_bytes", "uint64.lte"),
        (nodes_pb2.ReportOutcomesRequest(epoch=UUID, sequence=0, outcomes=[OUTCOME]), "sequence", "uint64.gte_lte"),
        # other numbers
        (nodes_pb2.ServableVersion(points=[0] * 257), "points", "repeated.max_items"),
        (nodes_pb2.ProbeMeasures(max_difference=-1.0), "max_difference", "double.gte"),
        (nodes_pb2.ProbeMeasures(max_error=float("inf")), "max_error", "double.finite"),
        (nodes_pb2.ProbeMeasures(tolerance=1.5), "tolerance", "double.gte_lte"),
        # enums
        (part(file=99), "file", "enum.defined_only"),
        (part(file=0), "file", "enum.not_in"),
        (organizations_pb2.CreateOrganizationKeyRequest(roles=[tenants_pb2.ROLE_CALLER]), "roles", "enum.in"),
        (request(fallback=99), "fallback", "enum.defined_only"),
        (request(priority=101), "priority", "int32.gte_lte"),
        (tenants_pb2.CreateKeyRequest(roles=[0]), "roles", "enum.not_in"),
        # lists
        (base(modules=[]), "modules", "repeated.min_items"),
        (base(known_names=["n"] * 65), "known_names", "repeated.max_items"),
        (base(ends=bases_pb2.SequenceEnds(token_ids=[1] * 1025)), "ends.token_ids", "repeated.max_items"),
        (base(chat_contents=3), "chat_contents", "enum.defined_only"),
        (base(chat_fault="x" * 401), "chat_fault", "string.max_len"),
        (tenants_pb2.CreateKeyRequest(roles=[1, 1]), "roles", "repeated.unique"),
        (sampling(stop=["x"] * 9), "sampling.stop", "repeated.max_items"),
        (sampling(stop_token_ids=[1] * 65), "sampling.stop_token_ids", "repeated.max_items"),
        (request(tokens=generation_pb2.TokenPrompt()), "tokens.ids", "repeated.min_items"),
        # masks
        (
            tenants_pb2.SetTenantQuotasRequest(tenant="acme", update_mask=FieldMask(paths=["quotas.colour"])),
            "update_mask",
            "field_mask.in",
        ),
        # durations
        (tenants_pb2.CreateKeyRequest(roles=[1], lifetime=Duration()), "lifetime", "duration.gte_lte"),
        (tenants_pb2.CreateKeyRequest(roles=[1], lifetime=Duration(seconds=3155760001)), "lifetime", "duration.gte_lte"),
        (admin_pb2.DrainRequest(grace=Duration(seconds=3601)), "grace", "duration.gte_lte"),
        (admin_pb2.DrainRequest(grace=Duration(seconds=-1)), "grace", "duration.gte_lte"),
        # times
        (tenants_pb2.ListUsageRequest(start_time=Timestamp(seconds=-1)), "start_time", "timestamp.gte_lte"),
        (tenants_pb2.ListUsageRequest(start_time=Timestamp(seconds=253402300800)), "start_time", "timestamp.gte_lte"),
        # presence
        (bases_pb2.RegisterBaseRequest(), "base", "required"),
        (catalog_pb2.PublishRequest(), "content", "required"),
        (generation_pb2.GenerateRequest(), "prompt", "required"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_bad_value_breaks_its_rule_and_no_other(message: Message, field: str, rule: str) -> None:
    assert (field, rule) in broken(message)
    assert {path for path, _ in broken(message)} == {field}


def test_every_kind_of_rule_in_the_api_has_a_bad_value_above() -> None:
    """Walks the rules themselves, so that a kind used for the first time fails here until it has a case."""
    cases = test_a_bad_value_breaks_its_rule_and_no_other.pytestmark[0].args[1]
    tried = {rule for _, _, rule in cases}
    used: set[str] = set()
    for descriptor in api_messages():
        for field in descriptor.fields:
            used |= rule_kinds(field)

    assert {kind for kind in used if not any(covers(rule, kind) for rule in tried)} == set()


def covers(rule: str, kind: str) -> bool:
    """`uint32.gt_lte` is the one rule of a range that states both ends."""
    family, _, name = rule.partition(".")
    return rule == kind or any(kind == f"{family}.{end}" for end in name.split("_"))


def rule_kinds(field: FieldDescriptor) -> set[str]:
    rules = field.GetOptions().Extensions[validate_pb2.field]
    found = {"required"} if rules.required else set()
    for typed, value in rules.ListFields():
        if typed.message_type is not None:
            found |= {
                f"{typed.name}.{rule.name}" for rule, _ in value.ListFields() if rule.name not in {"items", "keys", "values"}
            }
    return found


def test_the_vendored_file_is_what_the_validator_was_built_with() -> None:
    """Field numbers and types of the rules must be those that the installed protovalidate reads."""
    from protovalidate._gen.buf.validate import validate_pb

    installed = validate_pb.desc().proto
    vendored = validate_pb2.DESCRIPTOR

    assert installed.name == vendored.name
    fields = {
        f"{message.name}.{field.name}": (field.number, int(field.type))
        for message in installed.message_type
        for field in message.field
    }
    ours = {
        f"{message.name}.{field.name}": (field.number, field.type)
        for message in vendored.message_types_by_name.values()
        for field in message.fields
    }
    assert ours == fields
