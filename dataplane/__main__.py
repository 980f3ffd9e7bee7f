"""`python -m dataplane serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from pydantic import ValidationError

from dataplane.engine.collector import share
from dataplane.node import Node
from dataplane.settings import PREFIX, Settings
from veneer.errors import InvalidArgumentError, VeneerError
from veneer.logs import configure
from veneer.server import run_main
from veneer.settings import SettingError, fault_lines

_log = logging.getLogger("dataplane")
_STOP_S = 40.0


def main(argv: list[str] | None = None) -> int:
    """Runs the process and returns its exit status: 2 for settings that are wrong, 1 for a start that failed otherwise."""
    parser = argparse.ArgumentParser(prog="dataplane", description="Veneer's data plane; settings come from VENEER_DATAPLANE_*.")
    parser.add_argument("command", choices=["serve"], help="serve: stream tokens until a signal comes")
    parser.add_argument(
        "--secrets-dir",
        action="append",
        type=_folder,
        metavar="FOLDER",
        help="read settings that the environment lacks from files named like their variables, in lower case; may be repeated",
    )
    chosen = parser.parse_args(argv)
    try:
        settings = Settings(_secrets_dir=chosen.secrets_dir)  # type: ignore[call-arg]
        settings.check_start()
        configure(settings.log_level)
    except ValidationError as error:
        print(*fault_lines(error.errors(include_input=False, include_url=False), prefix=PREFIX), sep="\n", file=sys.stderr)
        return 2
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        run_main(_serve(settings))
    except VeneerError as error:
        _log.critical("the data plane cannot start", extra={"status": error.status, "cause": error.message})
        return 2 if isinstance(error, InvalidArgumentError) else 1
    except OSError as error:
        _log.critical("the data plane cannot start", extra={"status": "INTERNAL", "cause": str(error)})
        return 1
    return 0


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return Path(text)


async def _serve(settings: Settings) -> None:
    share()
    node = Node(settings)
    try:
        await node.start()
        await node.run()
    finally:
        async with asyncio.timeout(_STOP_S):  # the traceback shows what did not end
            await node.stop()


if __name__ == "__main__":
    sys.exit(main())
