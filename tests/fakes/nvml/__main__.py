"""Build the fake NVML and print the environment to use: `python -m tests.fakes.nvml DIR --gpus 8`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.fakes.nvml import Scenario, build, environment


def main() -> None:
    """Build, write a scenario of idle GPUs, print `export` lines for a shell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    args = parser.parse_args()
    directory = build(args.directory.resolve())
    scenario = directory / "scenario"
    Scenario(scenario, gpus=args.gpus).write()
    for name, value in environment(directory, scenario).items():
        print(f"export {name}={value}")


if __name__ == "__main__":
    main()
