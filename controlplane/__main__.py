"""`python -m controlplane serve|migrate|bootstrap|secrets`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pydantic import ValidationError

from controlplane.schema import make_first_operator, migrate
from controlplane.settings import PREFIX, Settings
from controlplane.vault import Vault, ensure_secret_file, ensure_secret_files, new_secret, open_vault
from veneer import logs
from veneer.errors import InvalidArgumentError, VeneerError
from veneer.server import run_main
from veneer.settings import fault_lines


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 when it could not be done, 2 for a setting or an argument that is wrong."""
    chosen = _parser().parse_args(arguments)
    try:
        if chosen.command == "secrets":
            ensure_secret_files(owner=chosen.owner, service=chosen.service)
            return 0
        settings = Settings(_secrets_dir=chosen.secrets_dir)  # type: ignore[call-arg]
        logs.configure(settings.log_level)
        if chosen.command == "serve":
            run_main(_serve(settings, open_vault(settings)))
        elif chosen.command == "migrate":
            done = migrate(settings, revision=chosen.to)
            came = f", from {done.before or 'none'}" if done.before != done.after else ""
            print(f"the schema is at revision {done.after}{came}")
        else:
            _bootstrap(settings, key_file=chosen.key_file, show=chosen.show or chosen.key_file is None, as_json=chosen.json)
    except ValidationError as error:
        print(*fault_lines(error.errors(include_input=False, include_url=False), prefix=PREFIX), sep="\n", file=sys.stderr)
        return 2
    except InvalidArgumentError as error:
        print(error, file=sys.stderr)
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
    migration = commands.add_parser("migrate", help="bring the schema up to date, as the owner of the tables")
    migration.add_argument("--to", default="head", metavar="REVISION", help="to this revision, up or down, not to the newest")
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


async def _serve(settings: Settings, vault: Vault) -> None:
    from controlplane.service import ControlPlane

    async with ControlPlane(settings, vault) as control_plane:
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
