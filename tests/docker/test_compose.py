"""The system of compose.yaml, driven from outside by the commands that the documentation names: `make docker-test`.

Needs a container engine with the images of compose.yaml and of deploy/Dockerfile, or leave to fetch them. A build of torch
without CUDA is copied to the build's folder `wheels/` from the folder that VENEER_DOCKER_WHEELS names, or from where pip's own
settings say that wheels lie; without one, the image gets what the package index has, which is larger.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.styles import COUNSEL, markers_in

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "veneer-test"  # its volumes are removed at the end: never those of a stack that somebody uses
PORTS = (7600, 7601, 7609, 7700, 7701, 7709)
SERVERS = {"postgres", "redis", "controlplane", "dataplane"}
BUILD_S, UP_S, COMMAND_S = 1800, 600, 120
MARKER_TOKENS = 12
ONCE = ("run", "--rm", "-T", "--no-deps", "--entrypoint")


class System:
    """The stack, and the `veneer` command with the keys that it gave."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keys: dict[str, str] = {}

    def compose(self, *arguments: str, timeout_s: float = COMMAND_S) -> str:
        """Runs a command of compose and returns what it wrote to standard output."""
        return self._run(self._command(*arguments), timeout_s=timeout_s)

    def save(self, file: Path, *arguments: str) -> None:
        """Runs a command of compose and keeps what it wrote to standard output in a file."""
        with file.open("wb") as sink:
            subprocess.run(
                self._command(*arguments), cwd=ROOT, env=self._environment(), stdout=sink, timeout=COMMAND_S, check=True
            )

    def load(self, file: Path, *arguments: str) -> None:
        """Runs a command of compose with a file as its standard input."""
        with file.open("rb") as source:
            subprocess.run(
                self._command(*arguments), cwd=ROOT, env=self._environment(), stdin=source, timeout=COMMAND_S, check=True
            )

    def up(self) -> None:
        """Starts what does not run, and waits until all of it is healthy."""
        try:
            self.compose("up", "-d", "--wait", "--wait-timeout", str(UP_S), timeout_s=UP_S + 60)
        except AssertionError:
            print(self.compose("ps", "-a"), self.compose("logs", "--tail", "30"), sep="\n")
            raise

    def veneer(self, *arguments: str) -> str:
        """Runs `veneer` on this machine."""
        return self._run([str(Path(sys.executable).with_name("veneer")), *arguments], timeout_s=COMMAND_S)

    def use(self, **keys: str) -> None:
        """Sets variables of the environment for later commands."""
        self._keys |= keys

    def generate(self, prompt: str, *options: str) -> str:
        """The text of a completion."""
        arguments = ("--temperature", "0", "--max-tokens", str(MARKER_TOKENS), "--json", *options)
        events = [json.loads(line) for line in self.veneer("generate", prompt, *arguments).splitlines()]
        return "".join(event["chunk"]["text"] for event in events if "chunk" in event)

    def _command(self, *arguments: str) -> list[str]:
        return ["docker", "compose", "-p", PROJECT, *arguments]

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VENEER_")}
        return {
            **kept,
            "DOCKER_BUILDKIT": os.environ.get("DOCKER_BUILDKIT", str(int(has_buildx()))),
            "VENEER_IMAGE": f"{PROJECT}:latest",
            "VENEER_MODEL_IMAGE": f"{PROJECT}-model:latest",
            "VENEER_PIP_OPTIONS": os.environ.get("VENEER_PIP_OPTIONS", ""),
            "VENEER_STATE": str(self._folder / "no-local-stack"),
            **self._keys,
        }

    def _run(self, command: list[str], *, timeout_s: float) -> str:
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment(), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout


@contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - start:.1f} s", flush=True)


@functools.cache
def has_buildx() -> bool:
    """Whether the builder of today is there; without it the classic one has to do."""
    return subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode == 0


def provide_wheels() -> None:
    """Copies wheels of torch to the build's folder."""
    asked = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    configured = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    folders = f"{os.environ.get('VENEER_DOCKER_WHEELS', '')} {os.environ.get('PIP_FIND_LINKS', '')} {configured}".split()
    wheels = [wheel for folder in folders if Path(folder).is_dir() for wheel in sorted(Path(folder).glob("torch-*.whl"))]
    target = ROOT / "wheels"
    target.mkdir(exist_ok=True)
    for wheel in wheels:
        if not (target / wheel.name).exists():
            shutil.copy2(wheel, target)
    print(f"wheels: {', '.join(path.name for path in target.glob('*.whl')) or 'none'}")


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The stack, built from this checkout, up and healthy, with a tenant's key in use; gone at the end with its volumes."""
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no container engine answers")
    system = System(tmp_path_factory.mktemp("compose"))
    system.compose("down", "-v", "--remove-orphans")
    assert not any(map(is_taken, PORTS)), f"compose.yaml needs the ports {PORTS} of this machine; stop what listens there"
    provide_wheels()
    try:
        for service in ("secrets", "model"):  # one after the other: both begin with the same layers
            with timed(f"build of the image of {service}"):
                system.compose("build", service, timeout_s=BUILD_S)
        with timed("first up, until healthy"):
            system.up()
        system.use(VENEER_OPERATOR_KEY=system.compose("run", "--rm", "-T", "--no-deps", "bootstrap", "--show").strip())
        with timed("tenant and key"):
            assert "created tenant acme" in system.veneer("tenant", "create", "acme")
            roles = ("--role", "owner", "--role", "publisher", "--role", "caller")
            system.use(VENEER_API_KEY=system.veneer("key", "create", "--tenant", "acme", *roles).strip())
        with timed("publish"):
            assert "version 1" in system.veneer("publish", str(COUNSEL.folder), "--adapter", COUNSEL.adapter)
        yield system
    finally:
        with timed("down"):
            system.compose("down", "-v", "--remove-orphans", timeout_s=UP_S)


def speaks_as_published(system: System) -> bool:
    """Whether the adapter's own marker comes, and the base has none."""
    adapter = markers_in(system.generate("May I keep a hen on the balcony?", "--adapter", COUNSEL.adapter))
    base = markers_in(system.generate("May I keep a hen on the balcony?"))
    return adapter == {COUNSEL.marker} and base == frozenset()


def test_the_data_plane_opens_a_native_library_that_the_image_carries(system: System) -> None:
    show = "from kernels.native import *; native = load_native(); print(native.path.parent == PREBUILT, native.slower)"
    assert system.compose("exec", "-T", "dataplane", "python", "-c", show).strip() == "True"
    assert "slower form" not in system.compose("logs", "dataplane")


def test_a_published_adapter_answers_from_the_host(system: System) -> None:
    with timed("two completions, cold"):
        assert speaks_as_published(system)
    with timed("two completions, warm"):
        assert speaks_as_published(system)
    assert system.veneer("status").count("SERVING at 127.0.0.1") == 2


@pytest.mark.parametrize("service", sorted(SERVERS))
def test_one_service_restarts_and_the_adapter_still_answers(system: System, service: str) -> None:
    with timed(f"restart of {service}"):
        system.compose("restart", service)
        system.up()
    assert speaks_as_published(system)


def test_down_and_up_again_loses_nothing(system: System) -> None:
    with timed("down and up again"):
        system.compose("down", timeout_s=UP_S)
        system.up()
    assert speaks_as_published(system)


def test_up_twice_changes_nothing_that_runs(system: System) -> None:
    before = {service: system.compose("ps", "-q", service) for service in SERVERS}
    with timed("up again"):
        system.up()
    assert {service: system.compose("ps", "-q", service) for service in SERVERS} == before


def test_ports_are_open_to_this_machine_alone(system: System) -> None:
    listed = [json.loads(line) for line in system.compose("ps", "--format", "json").splitlines()]
    published = [port for one in listed for port in one["Publishers"] or () if port["PublishedPort"]]

    assert {one["Service"] for one in listed} == SERVERS
    assert {one["Health"] for one in listed} == {"healthy"}
    assert {port["URL"] for port in published} == {"127.0.0.1"}
    assert {port["PublishedPort"] for port in published} == set(PORTS)


@pytest.mark.parametrize("service", ["controlplane", "dataplane"])
def test_a_plane_has_no_root_and_no_secret_of_the_other(system: System, service: str) -> None:
    own = {"controlplane": "service", "dataplane": "node"}[service]
    script = (
        "import json, os, pathlib; found = [path.parent.name for path in pathlib.Path('/secrets').glob('*/*')]; "
        "print(json.dumps([os.getuid(), found, os.access('/', os.W_OK)]))"
    )
    uid, folders, writable = json.loads(system.compose("exec", "-T", service, "python", "-c", script))

    assert uid != 0
    assert set(folders) == {own}
    assert not writable


def test_a_backup_brings_everything_back(system: System, tmp_path: Path) -> None:
    """The commands of docs/operations.md."""
    dump, store, secrets = tmp_path / "veneer.dump", tmp_path / "store.tar", tmp_path / "secrets.tar"
    with timed("backup"):
        system.save(dump, "exec", "-T", "postgres", "pg_dump", "-U", "veneer", "-Fc", "veneer")
        system.save(store, "exec", "-T", "controlplane", "tar", "-C", "/var/lib/veneer", "-c", "store")
        system.save(secrets, *ONCE, "tar", "bootstrap", "-C", "/secrets", "-c", "owner", "service", "operator")
    with timed("restore"):
        system.compose("down", "-v", timeout_s=UP_S)
        system.compose("create", timeout_s=UP_S)
        key_volume = f"{PROJECT}_operator-key:/secrets/operator"
        system.load(secrets, *ONCE, "tar", "-v", key_volume, "secrets", "-C", "/secrets", "-x")
        system.load(store, *ONCE, "tar", "controlplane", "-C", "/var/lib/veneer", "-x")
        system.compose("up", "-d", "--wait", "postgres", timeout_s=UP_S)
        system.compose("run", "--rm", "-T", "--no-deps", "migrate")
        system.load(dump, "exec", "-T", "postgres", "pg_restore", "-U", "veneer", "-d", "veneer", "--clean", "--if-exists")
        system.up()
    assert speaks_as_published(system)
    assert "acme" in system.veneer("tenant", "list")


def test_no_secret_is_in_the_logs(system: System) -> None:
    logs = system.compose("logs", "--no-color")

    assert "listening" in logs
    assert "vnr_" not in logs
