"""`python -m dataplane.engine --fd N --parent PID`: one engine on an inherited socket; started by `EngineClient`."""

from __future__ import annotations

import sys

from dataplane.engine.process import main

sys.exit(main())
