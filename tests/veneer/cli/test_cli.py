from __future__ import annotations

import io
import json
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.adapters import make_adapter_folder
from tests.fixtures.signing import Signer
from tests.veneer.cli.conftest import Outcome, Run
from veneer.artifact import BaseDescription
from veneer.local.stack import LocalStack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SECRET = re.compile(r"vnr_[A-Za-z0-9_-]{43}")


@pytest.fixture
def veneer(run: Run, stack: LocalStack) -> Run:
    """Runs a command against the local stack."""
    return lambda *arguments: run("--state", stack.folder, *arguments)


@pytest.fixture
def make_folder(tmp_path: Path, model_base: BaseDescription) -> Callable[[int], Path]:
    return lambda seed: make_adapter_folder(tmp_path / f"adapter-{seed}", model_base, seed=seed, scale=4.0)


def ok(outcome: Outcome) -> str:
    assert outcome.status == 0, outcome.err
    return outcome.out


def test_an_adapter_goes_from_folder_to_answer_and_back(
    veneer: Run, make_folder: Callable[[int], Path], model_dir: Path, tmp_path: Path
) -> None:
    origin = ("--label", "first", "--labels", "team=search", "--training-run", "run-7", "--data-digest", "cd" * 32)
    assert "published acme/tour version 1" in ok(veneer("publish", make_folder(1), "--adapter", "tour", *origin))
    published = json.loads(ok(veneer("publish", make_folder(2), "--adapter", "tour", "--json")))
    assert published["version"]["number"] == "2"
    listed = json.loads(ok(veneer("versions", "tour", "--json")))
    assert [one["label"] for one in listed] == ["", "first"]
    second, first = (one["digest"] for one in listed)

    generate = ("generate", "hello", "--adapter", "tour", "--max-tokens", 4, "--temperature", 0, "--json")
    assert served(veneer(*generate))["version"] == first
    assert second[:12] in ok(veneer("alias", "tour", "2"))
    followed(lambda: served(veneer(*generate))["version"] == second)
    assert "75 %" in ok(veneer("split", "tour", "1=3", f"{second[:10]}=1"))
    assert served(veneer(*generate, "--unit", "someone"))["sticky"] is True
    assert f"{second[:12]} 100 %" in ok(veneer("rollback", "tour"))
    assert f"{first[:12]} 100 %" in ok(veneer("rollback", "tour", "--to", "1"))
    assert "retired tour version 2" in ok(veneer("retire", "tour", "v2"))
    assert "first" in ok(veneer("versions", "tour"))
    assert "tour" in ok(veneer("adapters"))
    reported = json.loads(ok(veneer("report", "tour", "1", "--json")))
    stated = (reported["labels"], reported["training_run"], reported["data_digest"])
    assert stated == ({"team": "search"}, "run-7", "cd" * 32)
    assert ok(veneer("report", "tour", first[:12])) == ok(veneer("report", "tour", "v1"))
    checked = json.loads(ok(veneer("check", tmp_path / "adapter-1", "--base", model_dir, "--json")))
    assert checked["report"] == reported["report"]


def test_a_snapshot_of_the_hub_is_published_under_its_repositorys_name(
    veneer: Run, make_folder: Callable[[int], Path], tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--Acme--Support-LoRA" / "snapshots" / ("a1" * 20)
    snapshot.mkdir(parents=True)
    for file in make_folder(164).iterdir():
        (snapshot / file.name).symlink_to(file)  # as the cache holds them
    assert "published acme/support-lora version 1" in ok(veneer("publish", snapshot))


def test_a_publish_may_be_run_again_and_says_which_version_it_is(veneer: Run, make_folder: Callable[[int], Path]) -> None:
    folder = make_folder(61)
    first = json.loads(ok(veneer("publish", folder, "--adapter", "run-again", "--json")))
    again = json.loads(ok(veneer("publish", folder, "--adapter", "run-again", "--exist-ok", "--label", "later", "--json")))
    assert (again["version"], again["alias"]) == (first["version"], first["alias"])
    ok(veneer("publish", folder, "--adapter", "run-again", "--exist-ok", "--alias", "stable"))
    elsewhere = veneer("publish", folder, "--adapter", "run-again", "--exist-ok", "--alias", "canary")
    assert (elsewhere.status, "alias canary does not serve it alone" in elsewhere.err) == (1, True)
    assert veneer("publish", folder, "--adapter", "run-again").status == 1
    assert "ALREADY_EXISTS" in veneer("publish", folder, "--adapter", "another", "--exist-ok").err
    ok(veneer("publish", make_folder(63), "--adapter", "run-again", "--alias", "stable"))
    ok(veneer("retire", "run-again", "1"))
    assert "ALREADY_EXISTS" in veneer("publish", folder, "--adapter", "run-again", "--exist-ok").err


def test_an_answer_comes_from_a_version_that_is_named_in_any_way(veneer: Run, make_folder: Callable[[int], Path]) -> None:
    ok(veneer("publish", make_folder(62), "--adapter", "named"))
    [version] = json.loads(ok(veneer("versions", "named", "--json")))
    digest = version["digest"]
    ask = ("generate", "hello", "--adapter", "named", "--max-tokens", 2, "--json", "--version")
    assert [served(veneer(*ask, name))["version"] for name in ("1", "v1", digest[:10], digest)] == [digest] * 4
    missing = veneer(*ask, "7")
    assert (missing.status, "has no version 7" in missing.err) == (1, True)
    assert "Name it: --adapter" in veneer("generate", "hello", "--version", "1").err
    assert "the whole digest" in veneer(*ask, "1", "--owner", "acme").err


def test_an_answer_matches_the_schema_expression_or_grammar_on_the_command_line(veneer: Run, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    file, grammar = tmp_path / "schema.json", tmp_path / "yes.lark"
    file.write_text(json.dumps(schema))
    grammar.write_text('start: "yes" | "no"')
    for given in (file, json.dumps(schema)):
        assert json.loads(ok(veneer("generate", "hello", "--json-schema", given)))["ok"] in (True, False)
    assert re.fullmatch(r"[ab]{3}\n", ok(veneer("generate", "hello", "--regex", "[ab]{3}")))
    assert ok(veneer("generate", "hello", "--grammar", grammar)).strip() in ("yes", "no")


def test_a_published_version_is_given_a_signature(veneer: Run, make_folder: Callable[[int], Path], tmp_path: Path) -> None:
    signer, folder = Signer(), make_folder(31)
    pem, signature = tmp_path / "trainer.pem", tmp_path / "later.sig"
    pem.write_bytes(signer.pem)
    signature.write_bytes(signer.sign({path.name: path.read_bytes() for path in folder.iterdir()}))
    ok(veneer("publish", folder, "--adapter", "later"))
    refused = veneer("attach", "later", "1", signature)
    assert (refused.status, "which is not trusted" in refused.err) == (1, True)
    ok(veneer("trust", "add", pem))
    assert "trainer" in ok(veneer("attach", "later", "v1", signature))
    found = json.loads(ok(veneer("attach", "later", "1", signature, "--json")))
    assert (found["state"], found["key_id"]) == ("SIGNATURE_STATE_VERIFIED", signer.trusted.id)
    assert json.loads(ok(veneer("report", "later", "1", "--json")))["report"]["signature"] == found
    missing = veneer("attach", "later", "2", signature)
    assert (missing.status, "has no version 2" in missing.err) == (1, True)


def test_what_a_write_did_is_told_as_json(veneer: Run, make_folder: Callable[[int], Path], tmp_path: Path) -> None:
    def told(*arguments: object) -> Any:
        return json.loads(ok(veneer(*arguments, "--json")))

    for seed in (41, 42):
        ok(veneer("publish", make_folder(seed), "--adapter", "spoken"))
    second, first = (one["digest"] for one in told("versions", "spoken"))
    for write in (("alias", 2), ("split", "1=1", "2=1"), ("rollback", "--to", 1), ("promote", "--version", 1), ("retire", 2)):
        told(write[0], "spoken", *write[1:], "--dry-run")
    assert told("alias", "spoken", 2, "--expect", 1)["arms"] == [{"version": second, "weight": 1}]
    assert [one["weight"] for one in told("split", "spoken", "1=3", "2=1")["arms"]] == [3, 1]
    assert told("promote", "spoken", "--version", 2)["arms"] == [{"version": second, "weight": 1}]
    assert told("rollback", "spoken", "--to", 1)["arms"] == [{"version": first, "weight": 1}]
    assert told("freeze", "spoken")["frozen"] is True
    assert told("unfreeze", "spoken")["frozen"] is False
    assert told("grant", "create", "spoken", "nobody-yet")["grantee"] == "nobody-yet"
    assert told("grant", "revoke", "spoken", "nobody-yet") == {"adapter": "spoken", "grantee": "nobody-yet"}
    assert told("trust", "policy", "off") == {"policy": "off"}
    assert told("node", "unpin", first) == {"version": first, "was_pinned": False}
    key = told("key", "create", "--role", "caller")["key"]["id"]
    assert told("key", "revoke", key)["id"] == key
    assert SECRET.fullmatch(told("node", "token", "spare")["token"])
    assert told("node", "token", "spare", "--out", tmp_path / "token")["token"] == ""
    assert told("node", "token", "spare", "--unless", tmp_path / "token") == {"node_name": "spare", "has_key": True}
    assert told("retire", "spoken", 2)["state"] == "VERSION_STATE_RETIRED"
    assert told("delete", "spoken", 2)["version"]["digest"] == second
    assert told("delete", "spoken", "--force")["num_versions"] == "1"


def test_a_probe_runs_a_version_before_its_alias_moves(veneer: Run, make_folder: Callable[[int], Path]) -> None:
    published = json.loads(ok(veneer("publish", make_folder(21), "--adapter", "probed", "--probe", "--json")))
    version, probe = published["version"], published["version"]["report"]["probe"]
    assert (published["alias"]["name"], probe["state"], probe["faults"]) == ("stable", "PROBE_STATE_PASSED", [])
    assert (probe["num_prompts"], probe["num_samples"], probe["warnings"]) == (3, 4, [])
    assert probe["max_difference"] > 0
    assert 0 < probe["max_error"] <= probe["tolerance"]
    shown = ok(veneer("report", "probed", "1"))
    assert "difference from the stored files" in shown
    assert version["digest"] in shown


def followed(condition: Callable[[], bool]) -> None:
    """Waits until the data plane has followed a change: a busy machine may answer from memory for some seconds."""
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)  # what is watched is another process


def served(outcome: Outcome) -> dict[str, object]:
    events = [json.loads(line) for line in ok(outcome).splitlines()]
    assert list(events[-1]) == ["finish"]
    found = events[0]["served"]
    assert isinstance(found, dict)
    return found


def test_a_canary_is_started_shown_and_stopped(veneer: Run, make_folder: Callable[[int], Path]) -> None:
    for seed in (11, 12):
        ok(veneer("publish", make_folder(seed), "--adapter", "detour"))
    assert "running" in ok(veneer("canary", "start", "detour", "2", "--dry-run"))
    ok(veneer("canary", "start", "detour", "2", "--step", "5%:10m:100", "--step", "50:1h"))
    shown = json.loads(ok(veneer("canary", "show", "detour", "--json")))
    assert (shown["state"], shown["steps"][0]["duration"]) == ("CANARY_STATE_RUNNING", "600s")
    assert "stopped (it was asked to stop)" in ok(veneer("canary", "stop", "detour"))
    for step in ("5", "0:1m", "100:1m", "5:99999999h", "5:1m:99999999999"):
        refused = veneer("canary", "start", "detour", "2", "--step", step)
        assert (refused.status, "PERCENT:TIME" in refused.err) == (1, True)


def test_text_goes_to_standard_output_and_what_served_it_beside(veneer: Run) -> None:
    outcome = veneer("generate", "hello", "--max-tokens", 4, "--temperature", 0, "--raw", "--priority", 9)
    assert "[base]" in outcome.err
    assert "4 out" in outcome.err
    assert "[base]" not in ok(outcome)


def test_usage_is_listed_once_it_is_told(veneer: Run) -> None:
    ok(veneer("generate", "hello", "--max-tokens", 3))
    followed(lambda: "(base)" in ok(veneer("usage", "--by", "hour")))
    assert json.loads(ok(veneer("usage", "--tenant", "acme", "--json")))[-1]["output_tokens"]
    assert veneer("usage", "--tenant", "nobody").status == 1


def test_a_fallback_is_announced(veneer: Run) -> None:
    outcome = veneer("generate", "hello", "--adapter", "absent", "--max-tokens", 2, "--fallback", "any")
    ok(outcome)
    assert "in place of the adapter: not found" in outcome.err


def test_another_tenant_uses_a_granted_adapter_and_no_other(veneer: Run, make_folder: Callable[[int], Path]) -> None:
    ok(veneer("publish", make_folder(3), "--adapter", "shared"))
    ok(veneer("tenant", "create", "guest", "--weight", 2))
    key = ok(veneer("key", "create", "--tenant", "guest", "--role", "caller")).strip()
    assert SECRET.fullmatch(key)
    use = ("--key", key, "generate", "hello", "--owner", "acme", "--adapter", "shared", "--max-tokens", 2)
    refused = veneer(*use)
    assert refused.status == 1
    assert "NOT_FOUND" in refused.err
    ok(veneer("grant", "create", "shared", "guest"))
    assert "shared" in ok(veneer("grant", "list"))
    followed(lambda: "acme/shared version 1" in veneer(*use).err)
    ok(veneer("grant", "revoke", "shared", "guest"))
    [listed] = json.loads(ok(veneer("key", "list", "--tenant", "guest", "--json")))
    assert listed["roles"] == ["ROLE_CALLER"]
    ok(veneer("key", "revoke", listed["id"], "--tenant", "guest"))
    assert "guest: 90 requests/min, 2 streams" in ok(
        veneer("tenant", "quota", "guest", "--requests-per-minute", 90, "--streams", 2)
    )
    assert "guest: 32 rank rows" in ok(veneer("tenant", "limit", "guest", "--rank-rows", 32))
    assert "32 rank rows" in ok(veneer("tenant", "list"))


def test_an_organisation_manages_its_tenants_from_the_command_line(veneer: Run) -> None:
    ok(veneer("org", "create", "guild", "--max-tenants", 2, "--tenant-streams", 3))
    chief = ok(veneer("org", "key", "create", "--org", "guild", "--role", "owner", "--role", "auditor")).strip()
    assert SECRET.fullmatch(chief)
    asking = ("--org-key", chief)
    assert "guild--smiths" in ok(veneer(*asking, "tenant", "create", "guild--smiths"))
    assert "must begin with 'guild--'" in veneer(*asking, "tenant", "create", "smiths").err
    assert "--weight" in veneer(*asking, "tenant", "create", "guild--rich", "--weight", 9).err
    ok(veneer("tenant", "create", "guests-of-guild"))
    assert "belongs to organisation guild" in ok(veneer("org", "adopt", "guild", "guests-of-guild"))
    exhausted = veneer(*asking, "tenant", "create", "guild--third")
    assert (exhausted.status, "veneer org quota" in exhausted.err) == (1, True)
    assert [one["name"] for one in json.loads(ok(veneer(*asking, "tenant", "list", "--json")))] == [
        "guests-of-guild",
        "guild--smiths",
    ]
    assert "3 streams" in ok(veneer("tenant", "list", "--org", "guild"))
    key = json.loads(ok(veneer(*asking, "key", "create", "--tenant", "guild--smiths", "--role", "caller", "--json")))
    ok(veneer(*asking, "key", "revoke", key["key"]["id"], "--tenant", "guild--smiths"))
    assert "insert keys" in ok(veneer(*asking, "audit", "--tenant", "guild--smiths"))
    assert "usage: none" in ok(veneer(*asking, "usage", "--tenant", "guild--smiths"))
    assert "NOT_FOUND" in veneer(*asking, "usage", "--tenant", "acme").err

    shown = json.loads(ok(veneer(*asking, "org", "show", "--json")))
    assert (shown["organization"]["quotas"]["max_tenants"], shown["use"]["num_tenants"]) == ("2", "2")
    assert "guild--NAME" in ok(veneer("org", "show", "guild"))
    assert "5 adapters" in ok(veneer("org", "quota", "guild", "--max-adapters", 5))
    assert "guild" in ok(veneer("org", "list"))
    assert "max_adapters 0 → 5" in ok(veneer(*asking, "org", "audit"))
    [listed] = json.loads(ok(veneer(*asking, "org", "key", "list", "--json")))
    second = ok(veneer(*asking, "org", "key", "rotate", listed["id"], "--overlap-s", 0)).strip()
    assert "UNAUTHENTICATED" in veneer(*asking, "org", "show").err
    assert "owner" in ok(veneer("--org-key", second, "org", "key", "list"))
    newest = json.loads(ok(veneer("org", "key", "list", "--org", "guild", "--json")))[0]["id"]
    assert "revoked" in ok(veneer("org", "key", "revoke", newest, "--org", "guild"))
    assert "UNAUTHENTICATED" in veneer("--org-key", second, "org", "show").err


def test_numbers_that_a_command_does_not_name_stay_as_they_are(veneer: Run) -> None:
    ok(veneer("tenant", "create", "counted"))
    ok(veneer("tenant", "quota", "counted", "--streams", 5, "--adapters", 3))
    told = ok(veneer("tenant", "quota", "counted", "--streams", 0, "--requests-per-minute", 7))
    assert "7 requests/min, 3 adapters;" in told
    ok(veneer("tenant", "limit", "counted", "--rank-rows", 64, "--host-bytes", 9))
    assert "32 rank rows, 9 B in host memory" in ok(veneer("tenant", "limit", "counted", "--rank-rows", 32))
    ok(veneer("tenant", "fallback", "allowed", "--default", "previous", "--tenant", "counted"))
    assert "forbidden, by default previous" in ok(veneer("tenant", "fallback", "forbidden", "--tenant", "counted"))
    assert "exact, by default fail" in ok(veneer("tenant", "fallback", "exact", "--default", "fail", "--tenant", "counted"))
    ok(veneer("org", "create", "counts", "--max-tenants", 4, "--tenant-streams", 2, "--tenant-rank-rows", 16))
    told = ok(veneer("org", "quota", "counts", "--max-adapters", 6, "--tenant-adapters", 8))
    for words in ("4 tenants, 6 adapters", "2 streams, 8 adapters", "16 rank rows"):
        assert words in told
    for command in (("tenant", "quota", "counted"), ("tenant", "limit", "counted"), ("org", "quota", "counts")):
        refused = veneer(*command)
        assert (refused.status, "at least one" in refused.err) == (1, True), refused.err
    assert "4 tenants, 6 adapters" in ok(veneer("org", "list"))


def test_a_key_is_rotated_and_its_auditor_reads_who_did_it(veneer: Run) -> None:
    ok(veneer("tenant", "create", "audited"))
    first = json.loads(ok(veneer("key", "create", "--tenant", "audited", "--role", "auditor", "--json")))
    second = ok(veneer("key", "rotate", first["key"]["id"], "--tenant", "audited", "--overlap-s", 60)).strip()
    for secret in (first["secret"], second):
        told = ok(veneer("--key", secret, "audit"))
        assert "update keys" in told
        assert "operator " in told
    assert json.loads(ok(veneer("audit", "--tenant", "audited", "--json", "--limit", 1)))[0]["object"] == "keys"
    assert "insert bases" in ok(veneer("audit", "--installation", "--limit", 1000))
    refused = veneer("--key", second, "key", "create", "--role", "caller")
    assert (refused.status, "PERMISSION_DENIED" in refused.err) == (1, True)


def test_data_planes_follow_the_rotation_of_a_key(veneer: Run) -> None:
    ok(veneer("tenant", "create", "turning"))
    first = json.loads(ok(veneer("key", "create", "--tenant", "turning", "--role", "caller", "--json")))
    ask = ("generate", "hello", "--max-tokens", 1)
    ok(veneer("--key", first["secret"], *ask))
    second = ok(veneer("key", "rotate", first["key"]["id"], "--tenant", "turning", "--overlap-s", 0)).strip()
    ok(veneer("--key", second, *ask))
    followed(lambda: "UNAUTHENTICATED" in veneer("--key", first["secret"], *ask).err)
    assert json.loads(ok(veneer("key", "list", "--tenant", "turning", "--json")))[1]["successor"]


def test_status_shows_health_and_residency(veneer: Run) -> None:
    out = ok(veneer("status"))
    assert out.count("SERVING") == 2
    assert "KV pages" in out
    told = json.loads(ok(veneer("status", "--json")))
    assert [one["plane"] for one in told["planes"]] == ["control plane", "data plane"]
    assert told["residency"][0]["residency"]["engine"]["running"] == 0


def test_status_has_a_row_for_every_data_plane_and_fails_only_for_those_that_are_away(run: Run, stack: LocalStack) -> None:
    state = stack.state
    alias = state.data.replace("127.0.0.1", "localhost")
    named = ("--control", state.control, "--data", f"{state.data}, {alias}")
    both = run(*named, "status")
    assert (both.status, both.out.count("SERVING")) == (0, 3), both.out
    assert "--data-operators" in both.err
    keyed = ("--operator-key", state.operator_key)
    assert ok(run(*named, *keyed, "status")).count("SERVING") == 3  # listeners of operators that were not named are not asked
    operators = f"{state.data_operators},{state.data_operators.replace('127.0.0.1', 'localhost')}"
    assert ok(run(*named, *keyed, "--data-operators", operators, "status")).count("KV pages") == 2
    away = run("--control", state.control, "--data", f"{state.data},127.0.0.1:1", "status", "--json")
    told = [one["health"] for one in json.loads(away.out)["planes"]]
    assert (away.status, told) == (1, ["SERVING", "SERVING", "UNAVAILABLE"])
    half = run(*named, *keyed, "--data-operators", f"{state.data_operators},127.0.0.1:1", "status")
    assert (half.status, "cannot be asked" in half.out) == (1, True)
    assert "is no list of addresses" in run("--data", "127.0.0.1:1,", "status").err


def test_versions_are_named_wherever_they_are_shown(veneer: Run, make_folder: Callable[[int], Path]) -> None:
    digest = json.loads(ok(veneer("publish", make_folder(64), "--adapter", "called", "--json")))["version"]["digest"]
    ok(veneer("generate", "hello", "--adapter", "called", "--max-tokens", 1))
    [held] = [one for one in json.loads(ok(veneer("node", "residency", "--json")))["versions"] if one["version"] == digest]
    assert (held["owner"], held["adapter"], held["number"]) == ("acme", "called", "1")
    ok(veneer("node", "pin", digest))
    for command in (("status",), ("node", "residency"), ("node", "pins")):
        assert "acme/called v1" in ok(veneer(*command))
    assert "acme/called v1" in {one["name"] for one in json.loads(ok(veneer("top", "--once", "--json")))["versions"]}
    ok(veneer("node", "unpin", digest))


def test_a_version_is_seen_where_it_is_and_unloaded_with_proof(veneer: Run, make_folder: Callable[[int], Path]) -> None:
    published = json.loads(ok(veneer("publish", make_folder(7), "--adapter", "outgoing", "--json")))
    version = published["version"]["digest"]
    ok(veneer("generate", "hello", "--adapter", "outgoing", "--max-tokens", 40, "--temperature", 0))
    assert version[:12] in ok(veneer("node", "residency"))
    found = json.loads(ok(veneer("node", "residency", "--json")))["versions"]
    assert {one["version"]: one["tier"] for one in found}[version] == "TIER_DEVICE"
    freed = json.loads(ok(veneer("node", "unload", version, "--json")))["freed"]
    assert min(int(freed[tier]) for tier in ("device_bytes", "host_bytes", "disk_bytes")) > 0
    ok(veneer("publish", make_folder(9), "--adapter", "outgoing", "--alias", "stable"))
    ok(veneer("retire", "outgoing", "v1"))  # the plan may have had it brought again
    assert "nothing is left" in ok(veneer("node", "unload", version))
    followed(lambda: version[:12] not in ok(veneer("node", "residency")))
    followed(lambda: "no versions that begin with" in veneer("node", "unload", version[:12]).err)


def test_a_version_is_pinned_for_a_time_and_let_go(veneer: Run, make_folder: Callable[[int], Path]) -> None:
    version = json.loads(ok(veneer("publish", make_folder(8), "--adapter", "kept", "--json")))["version"]["digest"]
    assert "stays until" in ok(veneer("node", "pin", version, "--for", 1))
    [listed] = json.loads(ok(veneer("node", "pins", "--json")))["pins"]
    assert (listed["version"], listed["owner"]) == (version, "acme")
    assert version[:12] in ok(veneer("node", "pins"))
    assert "is no longer pinned" in ok(veneer("node", "unpin", version))
    assert "was not pinned" in ok(veneer("node", "unpin", version))
    assert json.loads(ok(veneer("node", "pins", "--json"))).get("pins", []) == []


def test_a_pinned_version_is_unloaded_by_force_or_when_its_operator_agrees(
    veneer: Run, make_folder: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = json.loads(ok(veneer("publish", make_folder(65), "--adapter", "held", "--json")))["version"]["digest"]

    def answer(text: str) -> Outcome:
        terminal = io.StringIO(text)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", terminal)
        return veneer("node", "unload", version)

    def is_pinned() -> bool:
        return version in {one["version"] for one in json.loads(ok(veneer("node", "pins", "--json"))).get("pins", [])}

    ok(veneer("node", "pin", version))
    with monkeypatch.context() as here:
        here.setattr("sys.stdin", io.StringIO())
        refused = veneer("node", "unload", version)
    assert (refused.status, "is pinned until" in refused.err, "--force" in refused.err) == (1, True, True)
    assert "veneer versions" not in refused.err
    declined = answer("n\n")
    assert (declined.status, "the pin stays" in declined.err, is_pinned()) == (1, True, True)
    assert "nothing is left" in ok(answer("y\n"))
    assert not is_pinned()
    ok(veneer("node", "pin", version))
    assert json.loads(ok(veneer("node", "unload", version, "--force", "--json")))["complete"] is True
    assert not is_pinned()


def test_what_to_do_after_an_error_fits_the_error(
    run: Run, veneer: Run, make_folder: Callable[[int], Path], stack: LocalStack, model_dir: Path
) -> None:
    folder = make_folder(66)
    ok(veneer("publish", folder, "--adapter", "hinted"))
    known = veneer("publish", folder, "--adapter", "renamed").err
    assert "is version 1 of adapter 'hinted' already" in known
    assert "Equal files are one version" in known
    assert "choose another name" not in known
    twice = veneer("up", "--model", model_dir).err
    assert f"`veneer --state {stack.folder} down` stops what runs there" in twice
    assert "veneer versions" not in twice
    ok(veneer("tenant", "create", "narrow"))
    ok(veneer("tenant", "limit", "narrow", "--rank-rows", 1))
    key = ok(veneer("key", "create", "--tenant", "narrow", "--role", "owner", "--role", "publisher", "--role", "caller")).strip()
    ok(veneer("--key", key, "publish", make_folder(67), "--adapter", "wide"))
    limited = veneer("--key", key, "generate", "hello", "--adapter", "wide").err
    assert "FAILED_PRECONDITION" in limited
    assert "`veneer tenant limit`" in limited
    moved = veneer("alias", "hinted", 1, "--expect", 7).err
    assert "moved it first" in moved
    assert (
        "--operator-key" in run("--operator-key", key, "--control-operators", stack.state.control_operators, "tenant", "list").err
    )
    assert "`veneer tenant list`" in veneer("tenant", "quota", "absent", "--streams", 1).err
    assert "`veneer tenant list`" in veneer("tenant", "create", "narrow").err
    ok(veneer("tenant", "quota", "narrow", "--adapters", 1))
    assert "`veneer tenant quota`" in veneer("--key", key, "publish", make_folder(68), "--adapter", "second").err


def test_a_data_plane_is_let_in_by_a_token_and_turned_out(veneer: Run, stack: LocalStack, tmp_path: Path) -> None:
    assert SECRET.fullmatch(ok(veneer("node", "token", "second")).strip())
    file = tmp_path / "token"
    ok(veneer("node", "token", "second", "--out", file))
    assert SECRET.fullmatch(file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kept = file.read_text()
    assert "has a key already" in ok(veneer("node", "token", "second", "--out", file, "--unless", stack.folder / "node.key"))
    assert file.read_text() == kept
    assert "local" in {listed["name"] for listed in json.loads(ok(veneer("node", "list", "--json")))}
    assert "local" in ok(veneer("node", "list"))
    assert "there is no such node" in veneer("node", "revoke", uuid.uuid4()).err


def test_the_operators_key_may_be_named_by_its_file(run: Run, stack: LocalStack, tmp_path: Path) -> None:
    file = tmp_path / "operator"
    file.write_text(stack.state.operator_key + "\n")
    to = ("--control-operators", stack.state.control_operators)
    assert "acme" in ok(run("--operator-key-file", file, *to, "tenant", "list"))
    assert run(*to, "tenant", "list").status == 1


def test_a_base_is_registered_once_and_listed(veneer: Run, model_dir: Path, model_base: BaseDescription) -> None:
    said = ok(veneer("base", "add", model_dir))
    assert model_base.digest in said
    assert model_base.eos_ids
    ends = ", ".join(map(str, model_base.eos_ids))
    assert f"a sequence ends at the tokens {ends}" in said
    assert "control tokens in contents of messages are ordinary text" in said
    listed = json.loads(ok(veneer("base", "list", "--json")))
    assert [(base["digest"], base["ends"]["token_ids"]) for base in listed] == [(model_base.digest, list(model_base.eos_ids))]
    assert ends in ok(veneer("base", "list"))


def test_a_base_says_what_control_tokens_in_contents_are(veneer: Run, model_dir: Path) -> None:
    said = ok(veneer("base", "add", model_dir, "--chat-contents", "tokens"))
    assert "contents can end a turn and begin another" in said
    assert "contents can end a turn and begin another" in ok(veneer("base", "add", model_dir)), "nothing said changes nothing"
    assert "tokens" in ok(veneer("base", "list"))
    assert json.loads(ok(veneer("base", "list", "--json")))[0]["chat_contents"] == "CHAT_CONTENTS_TOKENS"
    assert "ordinary text" in ok(veneer("base", "add", model_dir, "--chat-contents", "text"))


def test_a_base_whose_template_cannot_be_used_is_registered_and_says_so(veneer: Run, model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "other")
    (folder / "chat_template.jinja").write_text("{% nosuchtag %}")
    said = ok(veneer("base", "add", folder, "--name", "other"))
    assert "conversations cannot be served, texts and token ids can" in said
    assert "nosuchtag" in said
    (listed,) = (one for one in json.loads(ok(veneer("base", "list", "--json"))) if one["name"] == "other")
    assert "nosuchtag" in listed["chat_fault"]


def test_a_bad_adapter_is_refused_with_every_fault(veneer: Run, make_folder: Callable[[int], Path]) -> None:
    folder = make_folder(4)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 0, "use_qalora": True}))
    outcome = veneer("publish", folder, "--adapter", "bad")
    assert outcome.status == 1
    assert outcome.err.count("•") >= 2
    assert "INVALID_ARGUMENT" in outcome.err


def test_an_unknown_or_doubtful_version_is_refused(veneer: Run, make_folder: Callable[[int], Path]) -> None:
    ok(veneer("publish", make_folder(5), "--adapter", "versions"))
    assert "has no version 9" in veneer("alias", "versions", "9").err
    assert "named twice" in veneer("split", "versions", "1=1", "v1=2").err
    assert "is not VERSION=WEIGHT" in veneer("split", "versions", "1").err
    digest = json.loads(ok(veneer("versions", "versions", "--json")))[0]["digest"]
    assert "ABORTED" in veneer("alias", "versions", digest, "--expect", 77).err
