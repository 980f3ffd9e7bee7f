from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer

from dataplane.lora.holdings import TenantLimitError
from tests.fixtures.adapters import make_adapter_folder
from tests.fixtures.signing import Signer
from tests.veneer.cli.conftest import Run
from veneer.access import WrongKeyError
from veneer.artifact import BaseDescription
from veneer.cli import stack
from veneer.cli.app import _command, app
from veneer.cli.audit import changed
from veneer.cli.hints import hint_for
from veneer.cli.output import plain, print_error, size
from veneer.cli.target import Target
from veneer.client import Client
from veneer.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    VeneerError,
    Violation,
)
from veneer.local.state import DEFAULT_STATE, StackState, write_state
from veneer.operator_client import OperatorClient
from veneer.organization_client import OrganizationClient
from veneer.statuses import code_of, error_of, trailers_of

KEY = "vnr_" + "k" * 43
STATE = StackState(
    control="127.0.0.1:1", control_operators="127.0.0.1:2", control_metrics="", data="127.0.0.1:3", data_operators="127.0.0.1:4",
    data_metrics="", operator_key="operator", base_digest="d", base_name="tiny", tenant="acme", tenant_key="tenant",
)  # fmt: skip


def test_check_reports_what_an_adapter_holds(run: Run, model_dir: Path, model_base: BaseDescription, tmp_path: Path) -> None:
    folder = make_adapter_folder(tmp_path / "good", model_base, ranks=3)
    outcome = run("check", folder, "--base", model_dir, "--json")
    report = json.loads(outcome.out)
    assert (outcome.status, report["accepted"], report["report"]["max_rank"]) == (0, True, 3)
    shown = run("check", folder, "--base", model_dir).out
    assert "q_proj, v_proj" in shown
    assert "by module" in shown
    assert "3 of 256" in shown


def test_check_holds_a_signature_against_keys_on_this_machine(
    run: Run, model_dir: Path, model_base: BaseDescription, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "signed", model_base)
    signer, trusted, other = Signer(), tmp_path / "trainer.pem", tmp_path / "other.pem"
    trusted.write_bytes(signer.pem)
    other.write_bytes(Signer().pem)
    check = ("check", folder, "--base", model_dir)
    assert (run(*check, "--trust", trusted).status, run(*check).status) == (1, 0)

    (folder / "model.sig").write_bytes(signer.sign({path.name: path.read_bytes() for path in folder.iterdir()}))

    shown = run(*check, "--trust", other, "--trust", trusted)
    assert (shown.status, "trainer.pem" in shown.out) == (0, True)
    found = json.loads(run(*check, "--trust", trusted, "--json").out)["report"]["signature"]
    assert (found["state"], found["key_id"]) == ("SIGNATURE_STATE_VERIFIED", signer.trusted.id)
    refused = run(*check, "--trust", other)
    assert (refused.status, "which is not trusted" in refused.err) == (1, True)
    untold = run(*check)
    assert (untold.status, "UNKNOWN" in untold.out, "--trust FILE" in untold.err) == (0, False, True)
    (folder / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes() + b" ")
    changed = run(*check, "--trust", trusted, "--json")
    assert (changed.status, json.loads(changed.out)["violations"][0]["field"]) == (1, "signature: adapter_config.json")


def test_labels_without_a_value_are_refused_before_anything_is_sent(run: Run, tmp_path: Path) -> None:
    for labels, fault in ((["team"], "is not NAME=VALUE"), (["team=a", "team=b"], "is given twice")):
        options = [part for label in labels for part in ("--labels", label)]
        outcome = run("--state", tmp_path, "--key", KEY, "--control", "127.0.0.1:1", "publish", tmp_path, *options)
        assert (outcome.status, fault in outcome.err) == (1, True)


def test_check_says_which_tokens_activate_an_adapter(
    run: Run, model_dir: Path, model_base: BaseDescription, tmp_path: Path
) -> None:
    folder = make_adapter_folder(tmp_path / "activated", model_base, config={"alora_invocation_tokens": [5, 6]})
    outcome = run("check", folder, "--base", model_dir)
    assert outcome.status == 0
    assert "activated by tokens" in outcome.out
    assert "5, 6" in outcome.out
    assert json.loads(run("check", folder, "--base", model_dir, "--json").out)["report"]["invocation_tokens"] == [5, 6]


def test_check_lists_every_fault_and_fails(run: Run, model_dir: Path, model_base: BaseDescription, tmp_path: Path) -> None:
    folder = make_adapter_folder(tmp_path / "bad", model_base, config={"r": 0, "peft_type": "IA3"})
    outcome = run("check", folder, "--base", model_dir)
    assert outcome.status == 1
    assert outcome.err.count("•") >= 2
    violations = json.loads(run("check", folder, "--base", model_dir, "--json").out)["violations"]
    assert len(violations) == outcome.err.count("•")


def test_check_names_a_missing_file(run: Run, model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    outcome = run("check", tmp_path / "empty", "--base", model_dir)
    assert outcome.status == 1
    assert "adapter_config.json: is not in" in outcome.err


def test_without_a_key_the_command_says_where_to_get_one(run: Run, tmp_path: Path) -> None:
    outcome = run("--state", tmp_path, "adapters")
    assert outcome.status == 1
    assert "VENEER_API_KEY" in outcome.err
    assert "VENEER_OPERATOR_KEY" in run("--state", tmp_path, "tenant", "list").err


def test_a_plane_that_is_not_there_is_unavailable_with_advice(run: Run, tmp_path: Path) -> None:
    outcome = run("--state", tmp_path, "--key", KEY, "--control", "127.0.0.1:1", "adapters")
    assert outcome.status == 1
    assert "UNAVAILABLE" in outcome.err
    assert "veneer up" in outcome.err
    assert "--ca" in outcome.err
    assert KEY not in outcome.err + outcome.out
    assert run("--state", tmp_path, "--control", "127.0.0.1:1", "--data", "127.0.0.1:1", "status").status == 1


def test_an_address_that_serves_something_else_is_told_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    error = VeneerError("Method not found!")
    error.status = "UNIMPLEMENTED"
    print_error(error)
    assert "--control-operators" in capsys.readouterr().err


def test_down_without_a_stack_says_so(run: Run, tmp_path: Path) -> None:
    outcome = run("--state", tmp_path / "absent", "down")
    assert outcome.status == 0
    assert "nothing runs" in outcome.out
    assert not (tmp_path / "absent").exists()


def test_a_wrong_role_is_refused_before_anything_is_sent(run: Run, tmp_path: Path) -> None:
    outcome = run("--state", tmp_path, "--key", KEY, "key", "create", "--role", "admin")
    assert "`admin` is no role; there are auditor, caller, owner, publisher" in outcome.err


def test_wrong_usage_is_status_two(run: Run) -> None:
    assert run("publish", "/no/such/folder").status == 2
    assert run("generate", "hi", "--temperature", "9").status == 2


def test_a_local_key_never_travels_to_another_plane(tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    Target(state_folder=tmp_path).client()
    for elsewhere in ({"control": "other:7600"}, {"data": "other:7700"}, {"control_operators": "other:7601"}):
        with pytest.raises(UnauthenticatedError):
            Target(state_folder=tmp_path, **elsewhere).client()
        with pytest.raises(UnauthenticatedError):
            Target(state_folder=tmp_path, **elsewhere).operator()


def test_an_organisations_key_goes_before_an_operators_and_is_asked_for_by_name(tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    assert isinstance(Target(state_folder=tmp_path).steward(), OperatorClient)
    assert isinstance(Target(state_folder=tmp_path, org_key="k", operator_key="o").steward(), OrganizationClient)
    assert isinstance(Target(state_folder=tmp_path, org_key="k").keeper("acme"), OrganizationClient)
    assert isinstance(Target(state_folder=tmp_path, org_key="k").keeper(""), Client)
    with pytest.raises(UnauthenticatedError, match="VENEER_ORG_KEY"):
        Target(state_folder=tmp_path).organization()


def test_what_others_wrote_cannot_steer_the_terminal() -> None:
    assert plain("a\x1b[2Jb\x9b1mc\r\n\td\x07") == "a[2Jb1mc\n\td"


def test_markup_of_others_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(InvalidArgumentError.of([Violation("x[bold]", "is [red]wrong[/red]")]))
    assert "x[bold]: is [red]wrong[/red]" in capsys.readouterr().err


def test_a_retry_delay_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ResourceExhaustedError("full", retry_after_s=2.5))
    assert "Try again in 2.5 s." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bytes_", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (938_274, "938.3 kB"), (4e9, "4.0 GB")]
)
def test_sizes_are_for_people(bytes_: int, text: str) -> None:
    assert size(bytes_) == text


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("bash", {"COMP_WORDS": "veneer key r", "COMP_CWORD": "2"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "veneer key r"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "veneer key r", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_a_shell_completes_commands(run: Run, monkeypatch: pytest.MonkeyPatch, shell: str, words: dict[str, str]) -> None:
    monkeypatch.setenv("_VENEER_COMPLETE", f"complete_{shell}")
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    outcome = run()
    assert outcome.status == 0
    assert {"revoke", "rotate"} <= set(re.findall("[a-z]+", outcome.out))
    assert "create" not in re.findall("[a-z]+", outcome.out.split("Create")[0])


def test_the_completion_of_a_shell_can_be_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    outcome = run("--show-completion", "bash")
    assert outcome.status == 0
    assert "_VENEER_COMPLETE=complete_bash" in outcome.out


def test_a_bash_that_installed_the_completion_completes_commands(tmp_path: Path) -> None:
    script = """
        veneer --install-completion > /dev/null
        shopt -s expand_aliases && source ~/.bashrc
        complete -p veneer
        COMP_WORDS=(veneer key r) COMP_CWORD=2
        _veneer_completion veneer && printf '%s\\n' "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "--norc", "-euc", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    function, *words = done.stdout.splitlines()
    assert "_veneer_completion" in function
    assert sorted(words) == ["revoke", "rotate"]


def test_every_command_prints_json_for_programs() -> None:
    def commands(command: Any, *names: str) -> Iterator[tuple[str, set[str]]]:
        for name, below in getattr(command, "commands", {}).items():
            yield from commands(below, *names, name)
        if not hasattr(command, "commands"):
            yield " ".join(names), {option for parameter in command.params for option in parameter.opts}

    without = {name for name, options in commands(typer.main.get_command(app)) if "--json" not in options}
    assert without == {"up", "down"}


def answered(error: VeneerError) -> VeneerError:
    """The error as it comes from a plane."""
    trailers = grpc.aio.Metadata(*trailers_of(error))
    cause = grpc.aio.AioRpcError(code_of(error), grpc.aio.Metadata(), trailers, error.message)
    found = error_of(cause)
    found.__cause__ = cause
    return found


_UNSAID = {"FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS", "UNAVAILABLE"}
"""Of these the planes' messages say what to do, but for the kinds below."""


@pytest.mark.parametrize("family", VeneerError.__subclasses__())
def test_an_error_of_a_plane_says_what_to_do_where_its_message_may_not(
    capsys: pytest.CaptureFixture[str], family: type[VeneerError]
) -> None:
    print_error(answered(family("something")))
    error, _, hint = capsys.readouterr().err.partition("\n")
    assert error == f"error: {family.status}: something"
    assert bool(hint.strip()) is (family.status not in _UNSAID), hint


@pytest.mark.parametrize("family", [kind for kind in VeneerError.__subclasses__() if kind is not InvalidArgumentError])
def test_an_error_of_this_program_says_by_itself_what_to_do(
    capsys: pytest.CaptureFixture[str], family: type[VeneerError]
) -> None:
    print_error(family("do this"), command="publish")
    assert capsys.readouterr().err == f"error: {family.status}: do this\n"


def unreachable() -> VeneerError:
    empty = grpc.aio.Metadata()
    cause = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, "failed to connect")
    found = error_of(cause)
    found.__cause__ = cause
    return found


def quota(field: str) -> VeneerError:
    return answered(ResourceExhaustedError("used up", violations=[Violation(field, "5 of 5")]))


@pytest.mark.parametrize(
    ("error", "command", "words"),
    [
        (unreachable(), "adapters", "`veneer up` starts it"),
        (answered(NotFoundError("no")), "generate", "`veneer adapters`"),
        (answered(NotFoundError("no")), "tenant", "`veneer tenant list`"),
        (answered(NotFoundError("no")), "org", "`veneer org list`"),
        (answered(NotFoundError("no")), "usage", "`veneer tenant list`"),
        (answered(NotFoundError("no")), "publish", "`veneer base add`"),
        (answered(AlreadyExistsError("no")), "base", "`veneer base list`"),
        (answered(FailedPreconditionError("no")), "rollback", "`veneer versions ADAPTER`"),
        (quota("quotas.max_adapters"), "publish", "`veneer tenant quota`"),
        (quota("organization.quotas.max_adapters"), "publish", "`veneer org quota`"),
        (quota("quotas.max_tenants"), "tenant", "`veneer org quota`"),
        (answered(ResourceExhaustedError("no", retry_after_s=2.0)), "generate", "Try again in 2 s."),
        (answered(InvalidArgumentError("r is above 256")), "publish", "`veneer check FOLDER"),
        (InvalidArgumentError("r is above 256"), "check", "Mend the adapter"),
        (InvalidArgumentError("is no weight"), "split", "`--help`"),
        (answered(TenantLimitError("no")), "generate", "`veneer tenant limit`"),
        (answered(WrongKeyError("no")), "adapters", "Another kind of key"),
    ],
)
def test_what_to_do_follows_from_error_and_command(error: VeneerError, command: str, words: str) -> None:
    assert words in hint_for(error, command)


def test_the_command_of_a_line_is_found_behind_its_options() -> None:
    line = ["--state", "folder", "--key=k", "-x", "y", "tenant", "quota", "--streams", "1"]
    assert (_command(line), _command([]), _command(["--state"])) == ("tenant", "", "")


def test_a_file_that_cannot_be_read_is_named_without_a_traceback(run: Run, tmp_path: Path) -> None:
    (tmp_path / "stack").write_text("a file where a folder should be")
    outcome = run("--state", tmp_path / "stack" / "below", "up", "--model", tmp_path)
    assert outcome.status == 1
    assert "Traceback" not in outcome.err
    assert str(tmp_path) in outcome.err


def test_a_change_is_told_in_words() -> None:
    was = {"tenant": "acme", "adapter": "tone", "name": "stable", "generation": 1, "update_time": "a", "frozen": False}
    assert changed(json.dumps(was), json.dumps({**was, "generation": 2, "update_time": "b"})) == "tone/stable: generation 1 → 2"
    assert changed("", json.dumps({"name": "tone", "frozen": False, "create_time": "a"})) == "name tone"
    assert changed(json.dumps({"digest": "d" * 90}), "") == f"digest {'d' * 59}…"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--regex", "a", "--json-schema", "{}"), "cannot be given together"),
        (("--json-schema", "absent.json"), "neither a file nor a JSON object"),
        (("--json-schema", "{"), "is no JSON"),
        (("--json-schema", "LIST"), "is no schema"),
        (("--json-schema", "BYTES"), "not text in UTF-8"),
        (("--grammar", "EMPTY"), "--grammar: has 0 bytes"),
        (("--regex", ""), "--regex: has 0 bytes"),
        (("--regex", "a" * 1025), "--regex: has 1025 bytes"),
    ],
)
def test_a_constraint_that_cannot_be_one_is_refused_before_anything_is_sent(
    run: Run, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    files = {"LIST": b"[1]", "BYTES": b"\xff", "EMPTY": b""}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    given = [str(tmp_path / one) if one in files else one for one in options]
    outcome = run("--state", tmp_path, "--key", "vnr_x", "generate", "hi", *given)
    assert (outcome.status, words in outcome.err) == (1, True), outcome.err


def test_the_version_is_printed_without_a_command(run: Run) -> None:
    assert re.fullmatch(r"veneer \d+\.\d+\.\d+\S*\n", run("--version").out)


def test_commands_that_are_printed_name_the_stack_that_they_are_about(tmp_path: Path) -> None:
    state = StackState(
        control="c:1", control_operators="c:2", control_metrics="c:3", data="d:1", data_operators="d:2", data_metrics="d:3",
        operator_key="o", base_digest="b", base_name="tiny", tenant="demo",
    )  # fmt: skip
    folder = tmp_path / "a b"
    text = stack._welcome(folder, state)
    commands = [line.strip().removeprefix("Stop: ") for line in text.splitlines() if "veneer --state" in line]
    assert all(shlex.split(one)[:3] == ["veneer", "--state", str(folder)] for one in commands)
    assert len(commands) == 5
    assert not re.search(r"^(  |Stop: )veneer (?!--state)", text, re.MULTILINE)
    assert f"cat '{folder}'/tenant-demo.key" in text
    assert "--state" not in stack._welcome(DEFAULT_STATE, state)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "float16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float64"}, "bfloat16"),
        ({}, "bfloat16"),
        ([], "bfloat16"),
    ],
)
def test_the_type_is_that_of_the_model_where_it_is_left_to_it(tmp_path: Path, config: object, dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stack._dtype_of(tmp_path) == dtype


def test_a_type_that_is_none_is_wrong_usage(run: Run, tmp_path: Path) -> None:
    outcome = run("--state", tmp_path / "state", "up", "--dtype", "int8")
    assert (outcome.status, "float32" in outcome.err) == (2, True)
    assert not (tmp_path / "state").exists()


def test_the_type_is_handed_to_the_data_plane(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    class Stack:
        folder = tmp_path

        def __init__(self, folder: Path, model_dir: Path, **options: object) -> None:
            given.update(options)

        def start(self) -> None:
            raise UnavailableError("enough")

    monkeypatch.setattr(stack, "LocalStack", Stack)
    run("--state", tmp_path, "up", "--model", tmp_path, "--dtype", "float32")
    assert given["data_settings"] == {"dtype": "float32"}
