"""`python -m octavo.engine.process FOLDER PARENT`: the engine process. Started by
`EngineProcess`, which also sends it its configuration."""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.engine.process.host import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
