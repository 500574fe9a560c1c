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


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process as /proc shows it; `command` is its command line, arguments joined by spaces."""

    pid: int
    parent: int
    command: str


def processes(proc: Path = Path("/proc")) -> Iterator[Process]:
    """Every process that can be read (kernel threads have no command line and are left out)."""
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            with (folder / "cmdline").open("rb") as stream:
                raw = stream.read(MAX_COMMAND)
            parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        if raw:
            command = raw.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
            yield Process(pid=int(folder.name), parent=parent, command=command)


def candidates(
    patterns: Mapping[str, tuple[str, ...]], seen: Iterable[Process] | None = None
) -> list[Candidate]:
    """One candidate per (kind, port): the first process, not the workers that it started.

    `patterns` maps an engine kind to regular expressions on the command line. A process without
    a port of its own below one that was recognised is a worker; any other uses the kind's default.
    """
    compiled = {kind: [re.compile(text) for text in texts] for kind, texts in patterns.items()}
    everything = {process.pid: process for process in (processes() if seen is None else seen)}
    recognised = {
        pid: kind for pid, process in everything.items() if (kind := _kind_of(process.command, compiled))
    }
    found: dict[tuple[str, int], Candidate] = {}
    for pid, kind in sorted(recognised.items()):
        process = everything[pid]
        said = _PORT.search(process.command)
        if said is None and _below(process, everything, recognised):
            continue
        port = int(said.group(1)) if said else DEFAULT_PORTS.get(kind, 0)
        if 0 < port < 65536:
            candidate = Candidate(pid=pid, kind=kind, port=port, command=process.command)
            found.setdefault((kind, port), candidate)
    return list(found.values())


def _below(process: Process, everything: Mapping[int, Process], recognised: Mapping[int, str]) -> bool:
    """Whether an ancestor was recognised too (the chain is followed as far as it can be read)."""
    passed = {process.pid}
    while (parent := everything.get(process.parent)) is not None and parent.pid not in passed:
        if parent.pid in recognised:
            return True
        passed.add(parent.pid)
        process = parent
    return False


def _kind_of(command: str, compiled: Mapping[str, list[re.Pattern[str]]]) -> str | None:
    for kind, expressions in compiled.items():
        if any(expression.search(command) for expression in expressions):
            return kind
    return None
