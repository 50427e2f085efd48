"""What pyproject.toml asks for, one requirement a line: for layers of an image that change only
when this does.

    python deploy/requirements.py --extra grammar > requirements.txt
    python deploy/requirements.py --torch +cpu > torch.txt      # the build of torch to take
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def requirements(extras: list[str]) -> list[str]:
    """Of the package, and of these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


def torch(build: str) -> str:
    """torch as constrained, in one of its builds."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch==")) + build


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--torch", metavar="BUILD")
    args = parser.parse_args()
    print("\n".join([torch(args.torch)] if args.torch else requirements(args.extra)))


if __name__ == "__main__":
    main()
