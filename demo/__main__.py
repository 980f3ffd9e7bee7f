"""`python -m demo`: see `demo.run`."""

from demo.run import main

raise SystemExit(main())
