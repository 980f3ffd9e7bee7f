"""Generates the Python code of the API: `python proto/generate.py`.

Reads every `.proto` file below this folder and writes messages, gRPC stubs and type stubs to the folder of the same name at the
root (`proto/veneer/x/v1/y.proto` → `veneer/x/v1/y_pb2.py`). The output is ignored by git. Files whose text does not change keep
their time stamps, and files that no longer have a source are deleted, so the script may be run at any time.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

_SOURCES = Path(__file__).resolve().parent
_ROOT = _SOURCES.parent
_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
_VENDORED = "buf"


def generate(root: Path = _ROOT) -> int:
    """Brings the generated files below `root` up to date.

    Returns:
        Number of files that were written or deleted; 0 when everything was up to date.

    Raises:
        RuntimeError: A plugin is missing, or the compiler refused a source; it has printed why.
    """
    sources = sorted(path.relative_to(_SOURCES).as_posix() for path in _SOURCES.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        _compile(sources, fresh)
        for package in (fresh / _VENDORED, fresh / _VENDORED / "validate"):
            (package / "__init__.py").write_text('"""Generated from the vendored files of proto/buf."""\n', encoding="utf-8")
        return _mirror(fresh, root)


def _compile(sources: list[str], folder: Path) -> None:
    services = [source for source in sources if "service " in (_SOURCES / source).read_text(encoding="utf-8")]
    well_known = resources.files("grpc_tools") / "_proto"
    common = ["protoc", f"-I{_SOURCES}", f"-I{well_known}", f"--plugin=protoc-gen-mypy={_plugin('protoc-gen-mypy')}"]
    messages = [*common, f"--python_out={folder}", f"--mypy_out=quiet:{folder}", *sources]
    plugin = f"--plugin=protoc-gen-mypy_grpc={_plugin('protoc-gen-mypy_grpc')}"
    stubs = [*common, plugin, f"--grpc_python_out={folder}", f"--mypy_grpc_out=quiet,async_only:{folder}", *services]
    for command in (messages, stubs):
        if protoc.main(command) != 0:
            raise RuntimeError("protoc failed, see its messages above")


def _plugin(name: str) -> str:
    """Finds a compiler plugin beside this interpreter, or on the search path (as in an isolated build)."""
    found = shutil.which(name, path=os.pathsep.join((sysconfig.get_path("scripts"), os.defpath))) or shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: pip install -c constraints.txt mypy-protobuf")
    return found


def _mirror(fresh: Path, root: Path) -> int:
    """Makes `root` hold exactly the files of `fresh` among generated ones, touching only those that differ."""
    changed = 0
    wanted = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    for name in sorted(wanted):
        target, content = root / name, (fresh / name).read_bytes()
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f"{target.name}.{os.getpid()}")
            partial.write_bytes(content)
            partial.replace(target)
            changed += 1
    for package in (root / "veneer", root / _VENDORED):
        for pattern in _PATTERNS:
            for path in package.rglob(pattern):
                if path.relative_to(root) not in wanted:
                    path.unlink()
                    changed += 1
    return changed


if __name__ == "__main__":
    try:
        print(f"stubs: {generate()} files changed")
    except RuntimeError as error:
        sys.exit(f"proto/generate.py: {error}")
