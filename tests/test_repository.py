"""What holds for the files of the repository themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BINARY = {".safetensors", ".png", ".gz", ".ico"}

# A file must be true on every machine. The patterns are put together so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(
    "|".join(
        (
            "/ro" + "ot/",
            "/wo" + "rk/",
            r"/ho" + r"me/(?!you\b|someone\b|user\b|veneer\b|nonroot\b)\w+",
            "/opt/" + "wheels",
            "/opt/" + "pypi",
        )
    )
)
REGISTRY_HOSTS = re.compile(
    "|".join(
        (
            "files.python" + "hosted",
            "pypi" + r"\.org",
            "registry" + r"\.npmjs",
            "deb" + r"\.debian",
            "jfr" + "og",
            "/artifact" + "ory/",
        )
    ),
    re.IGNORECASE,
)
SECRETS = re.compile(
    "|".join(
        (
            r"vnr_[A-Za-z0-9_-]{43}\b",
            "BEGIN [A-Z ]*PRIVATE " + "KEY",
            r"\bgh" + r"[pousr]_[A-Za-z0-9]{36}",
            r"\bAKIA" + r"[A-Z0-9]{16}\b",
        )
    )
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def tracked() -> list[Path]:
    """Files of the repository that are text; those not yet added count too."""
    if not (ROOT / ".git").exists():
        pytest.fail("the tests of the repository need its git folder")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file() and Path(name).suffix not in BINARY]


def matches(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if match := pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    return found


def anchors(markdown: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", markdown, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("pattern", [MACHINE_PATHS, REGISTRY_HOSTS, SECRETS], ids=["machine paths", "registry hosts", "secrets"])
def test_no_file_names(pattern: re.Pattern[str]) -> None:
    assert matches(pattern) == []


def test_the_patterns_find_what_they_look_for() -> None:
    assert MACHINE_PATHS.search("model in /ho" + "me/alice/model")
    assert REGISTRY_HOSTS.search("--extra-index-url=" + "https:" + "//pypi" + ".org/simple")
    assert SECRETS.search("vnr_" + "a" * 43)


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    broken = []
    for path in tracked():
        if path.suffix != ".md":
            continue
        for target in LINK.findall(path.read_text(encoding="utf-8")):
            if "://" in target or target.startswith("mailto:"):
                continue
            name, _, fragment = target.partition("#")
            linked = (path.parent / name).resolve() if name else path
            if not linked.exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
            elif fragment and linked.suffix == ".md" and fragment not in anchors(linked.read_text(encoding="utf-8")):
                broken.append(f"{path.relative_to(ROOT)}: {target} has no such heading")

    assert broken == []


def test_every_adr_is_in_the_index_and_has_its_sections() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text(encoding="utf-8")
    faults = []
    for path in sorted(folder.glob("[0-9]*.md")):
        text = path.read_text(encoding="utf-8")
        if f"({path.name})" not in index:
            faults.append(f"{path.name} is not in the index")
        faults += [
            f"{path.name} lacks {section}"
            for section in ("Status:", "## Context", "## Decision", "## Consequences", "## Alternatives")
            if section not in text
        ]

    assert faults == []


def test_the_readme_names_the_first_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert "make demo" in readme
    assert "make test" in readme
    assert "docker compose up" in readme or not (ROOT / "compose.yaml").exists()


def test_every_target_of_make_is_listed_by_help() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)

    assert phony is not None
    assert [name for name in phony.group(1).split() if f"make {name} " not in listed] == []


def test_the_api_files_pass_the_linter_comments_included() -> None:
    """STANDARD and COMMENTS: every service, call, message, field and enum value says what it is."""
    buf = shutil.which("buf", path=sysconfig.get_path("scripts"))
    assert buf is not None

    result = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout


def test_generating_twice_changes_nothing() -> None:
    command = [sys.executable, "proto/generate.py"]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)

    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    assert again.stdout == "stubs: 0 files changed\n"


def test_every_constraint_is_an_exact_public_version() -> None:
    """A local version (`+cpu`) or a path would tie the file to one index."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()

    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line)] == []


def test_everything_that_is_required_is_constrained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = {re.split(r"[\[<>=~;! ]", line)[0] for line in required} - {"veneer"}
    constrained = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    }

    assert sorted(name for name in names if name.lower().replace("_", "-") not in constrained) == []
