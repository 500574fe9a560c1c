"""A really running `transformers serve` on the CPU with continuous batching."""

from __future__ import annotations

from pathlib import Path

from checks.engines.server import ENGINES, Server, free_port

MODEL = str(ENGINES / "tiny-llama")
SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class TransformersServe(Server):
    """One process; requests name the model by its folder."""

    def __init__(self, log: Path, *arguments: str) -> None:
        port = free_port()
        command = [
            str(ENGINES / "transformers/bin/transformers"), "serve", MODEL, "--continuous-batching",
            "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port),
            "--cb-num-blocks", "64", "--cb-max-batch-tokens", "256", *arguments,
        ]  # fmt: skip
        home = log.parent / "hub"  # its list of models is that of the local cache: an empty one
        super().__init__(log, command, SETTINGS | {"HF_HOME": str(home)}, port)
