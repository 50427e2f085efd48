"""`python -m octavo` is the command `octavo`."""

import sys

from octavo.server.cli import main

sys.exit(main())
