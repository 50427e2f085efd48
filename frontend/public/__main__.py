"""`python -m octavo` is the command `octavo`."""

import sys

from octavo.server.command_line.main import main

sys.exit(main())
