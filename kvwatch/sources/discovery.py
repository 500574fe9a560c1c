"""Which inference servers run on this host: from command lines first, then one polite question each.

Only processes whose command line an adapter recognises are asked, on loopback, one request at
a time. Nothing else on the host is contacted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_COMMAND = 4096
_PORT = re.compile(r"--port[= ](\d{1,5})(?=\s|$)")
# What each server listens on when its command line does not say (each project's documentation).
DEFAULT_PORTS: Mapping[str, int] = {
    "vllm": 8000,
    "sglang": 30000,
    "llamacpp": 8080,
    "tgi": 3000,
    "trtllm": 8000,
    "triton": 8002,
    "lmdeploy": 23333,
    "ollama": 11434,
    "transformers": 8000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A process that looks like a server: which kind, where it should listen, and what says so."""

    pid: int
    kind: str
    port: int
    command: str

    @property
    def url(self) -> str:
        """Where it is asked."""
        return f"http://127.0.0.1:{self.port}"


def commands(proc: Path = Path("/proc")) -> Iterator[tuple[int, str]]:
    """(pid, command line) of every process that can be read, arguments joined by spaces."""
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            with (folder / "cmdline").open("rb") as stream:
                raw = stream.read(MAX_COMMAND)
        except OSError:
            continue
        if raw:
            yield int(folder.name), raw.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")


def candidates(
    patterns: Mapping[str, tuple[str, ...]], processes: Iterable[tuple[int, str]] | None = None
) -> list[Candidate]:
    """One candidate per (kind, port): the lowest pid, which is the parent of its workers.

    `patterns` maps an engine kind to regular expressions on the command line. Worker processes
    carry no port of their own; they match their parent's entry or the kind's default port.
    """
    compiled = {kind: [re.compile(text) for text in texts] for kind, texts in patterns.items()}
    found: dict[tuple[str, int], Candidate] = {}
    for pid, command in sorted(commands() if processes is None else processes):
        kind = _kind_of(command, compiled)
        if kind is None:
            continue
        said = _PORT.search(command)
        port = int(said.group(1)) if said else DEFAULT_PORTS.get(kind, 0)
        if 0 < port < 65536:
            found.setdefault((kind, port), Candidate(pid=pid, kind=kind, port=port, command=command))
    return list(found.values())


def _kind_of(command: str, compiled: Mapping[str, list[re.Pattern[str]]]) -> str | None:
    for kind, expressions in compiled.items():
        if any(expression.search(command) for expression in expressions):
            return kind
    return None
