"""`python -m controlplane serve|migrate|bootstrap|secrets`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pydantic import ValidationError

from controlplane.schema import make_first_operator, migrate
from controlplane.settings import Settings
from controlplane.vault import ensure_secret_file, ensure_secret_files, new_secret, open_vault
from veneer import logs
from veneer.errors import VeneerError
from veneer.server import run_main


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    chosen = _parser().parse_args(arguments)
    try:
        if chosen.command == "secrets":
            ensure_secret_files(owner=chosen.owner, service=chosen.service)
            return 0
        settings = Settings(_secrets_dir=chosen.secrets_dir)  # type: ignore[call-arg]
        logs.configure(settings.log_level)
        if chosen.command == "serve":
            run_main(_serve(settings))
        elif chosen.command == "migrate":
            migrate(settings)
        else:
            _bootstrap(settings, key_file=chosen.key_file, show=chosen.show or chosen.key_file is None, as_json=chosen.json)
    except ValidationError as error:
        for fault in error.errors():
            name = "VENEER_CONTROLPLANE_" + "_".join(str(part) for part in fault["loc"]).upper()
            print(f"{name}: {fault['msg']}", file=sys.stderr)
        return 2
    except (OSError, ValueError, VeneerError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m controlplane", description="The control plane of Veneer.")
    parser.add_argument(
        "--secrets-dir",
        action="append",
        type=_folder,
        metavar="FOLDER",
        help="read settings that the environment lacks from files named like their variables, in lower case; may be repeated",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="serve until SIGTERM")
    commands.add_parser("migrate", help="bring the schema up to date, as the owner of the tables")
    bootstrap = commands.add_parser("bootstrap", help="make the first operator and show its key, once")
    bootstrap.add_argument("--key-file", type=Path, metavar="FILE", help="keep the key here, not shown; may then be run again")
    bootstrap.add_argument("--show", action="store_true", help="show the key although it is kept")
    bootstrap.add_argument("--json", action="store_true", help="print a JSON object")
    secrets = commands.add_parser("secrets", help="make the passwords and the pepper of an installation; those that exist stay")
    secrets.add_argument("--owner", type=Path, required=True, metavar="FOLDER", help="for `migrate` and `bootstrap` alone")
    secrets.add_argument("--service", type=Path, required=True, metavar="FOLDER", help="for `serve` too")
    return parser


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return Path(text)


async def _serve(settings: Settings) -> None:
    from controlplane.service import ControlPlane

    async with ControlPlane(settings, open_vault(settings)) as control_plane:
        await control_plane.server.run()


def _bootstrap(settings: Settings, *, key_file: Path | None, show: bool, as_json: bool) -> None:
    if settings.pepper_file is not None:
        ensure_secret_file(settings.pepper_file)
    secret = None
    if key_file is not None:
        ensure_secret_file(key_file, new_secret)
        secret = key_file.read_text().strip()
    secret = make_first_operator(settings, open_vault(settings), secret=secret)
    if show:
        print(json.dumps({"operator_key": secret}) if as_json else secret)


if __name__ == "__main__":
    sys.exit(main())
