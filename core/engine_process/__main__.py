"""`python -m octavo.core.engine_process FOLDER PARENT`: the engine process. Started by
`EngineProcess`, which also sends it its configuration."""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.core.engine_process.host import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
