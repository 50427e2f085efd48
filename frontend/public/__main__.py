"""`python -m octavo` is the command `octavo`, found as its installed script finds it."""

import sys
from importlib.metadata import distribution

(command,) = distribution("octavo").entry_points.select(group="console_scripts", name="octavo")
sys.exit(command.load()())
