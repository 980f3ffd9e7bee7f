"""`python -m controlplane serve|migrate|bootstrap`."""

from __future__ import annotations

import argparse
import json
import sys

from pydantic import ValidationError

from controlplane.schema import make_first_operator, migrate
from controlplane.settings import Settings
from controlplane.vault import ensure_pepper_file, open_vault
from veneer import logs
from veneer.errors import VeneerError
from veneer.server import run_main


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m controlplane", description="The control plane of Veneer.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="serve until SIGTERM")
    commands.add_parser("migrate", help="bring the schema up to date, as the owner of the tables")
    bootstrap = commands.add_parser("bootstrap", help="make the first operator and show its key, once")
    bootstrap.add_argument("--json", action="store_true", help="print a JSON object")
    chosen = parser.parse_args(arguments)
    try:
        settings = Settings()
        logs.configure(settings.log_level)
        if chosen.command == "serve":
            run_main(_serve(settings))
        elif chosen.command == "migrate":
            migrate(settings)
        else:
            _bootstrap(settings, as_json=chosen.json)
    except ValidationError as error:
        for fault in error.errors():
            name = "VENEER_CONTROLPLANE_" + "_".join(str(part) for part in fault["loc"]).upper()
            print(f"{name}: {fault['msg']}", file=sys.stderr)
        return 2
    except (ValueError, VeneerError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _serve(settings: Settings) -> None:
    from controlplane.service import ControlPlane

    async with ControlPlane(settings, open_vault(settings)) as control_plane:
        await control_plane.server.run()


def _bootstrap(settings: Settings, *, as_json: bool) -> None:
    if settings.pepper_file is not None:
        ensure_pepper_file(settings.pepper_file)
    secret = make_first_operator(settings, open_vault(settings))
    print(json.dumps({"operator_key": secret}) if as_json else secret)


if __name__ == "__main__":
    sys.exit(main())
