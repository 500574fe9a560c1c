"""Which inference servers run on this host: from processes first, then one polite question each.

Two kinds of processes are asked: those whose command line an adapter recognises, and those that use a
GPU (or started one that does) and listen. Known paths only, on loopback, one request at a time. Nothing
else on the host is contacted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvwatch.sources.listening import Listener, Sockets, is_port, published

MAX_COMMAND = 4096
MAX_PORTS = 4  # of one process whose command line does not say which is the right one
UNKNOWN = "auto"  # the kind of a server that its command line does not tell
_PORT = re.compile(r"--port[= ](\d{1,5})(?=\s|$)")
_METRICS_PORT = re.compile(r"--metrics-port[= ](\d{1,5})(?=\s|$)")
# What each server listens on when its command line does not say.
DEFAULT_PORTS: Mapping[str, int] = {
    "vllm": 8000,
    "sglang": 30000,
    "llamacpp": 8080,
    "tgi": 3000,
    "trtllm": 8000,
    "triton": 8002,  # its metrics; requests go to 8000
    "lmdeploy": 23333,
    "ollama": 11434,
    "dynamo": 8000,  # the front end (1.6.1); workers tell theirs in DYN_SYSTEM_PORT alone
    "nim": 8000,  # /v1/metrics (docs.nvidia.com/nim)
    "lmcache": 6999,  # internal_api_server_port_start (0.5.6)
    "lightllm": 8000,  # lightllm/server/api_cli.py
    "mlc": 8000,  # mlc_llm/cli/serve.py
    "transformers": 8000,
}
# Whoever started these did not start an inference server; they listen for other reasons.
_SUPERVISORS = re.compile(
    r"(?:^|/)(?:systemd|init|sshd|dockerd|containerd(?:-shim\S*)?|conmon|crio|kubelet|podman|slurmstepd|slurmd"
    r"|supervisord|tmux|screen)\b"
)
_EXPORTER = re.compile(r"(?:^|/)dcgm-exporter(?:\s|$)")
_EXPORTER_ADDRESS = re.compile(r"(?:\s-a|\s--address)[= ]\S*:(\d{1,5})(?=\s|$)")
EXPORTER_PORT = 9400


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A process that looks like a server: which kind, where it should listen, and what says so.

    `ports` are tried in this order. With a `problem` it is not asked: it cannot be reached on loopback.
    """

    pid: int
    kind: str
    ports: tuple[int, ...]
    command: str
    host: str = "127.0.0.1"
    problem: str = ""

    @property
    def port(self) -> int:
        """The port that is asked first."""
        return self.ports[0]

    @property
    def url(self) -> str:
        """Where it is asked first."""
        return self.url_at(self.port)

    def url_at(self, port: int) -> str:
        """The URL at one of its ports."""
        return f"http://{self.host}:{port}"


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


class Host:
    """The processes of this host at one moment, and where they listen."""

    def __init__(self, seen: Iterable[Process] | None = None, sockets: Sockets | None = None) -> None:
        self.processes = {process.pid: process for process in (processes() if seen is None else seen)}
        self._sockets = sockets or Sockets()
        self._published = published(process.command for process in self.processes.values())

    def chain(self, pid: int) -> Iterator[Process]:
        """A process and its ancestors, as far as they can be read."""
        passed: set[int] = set()
        while (process := self.processes.get(pid)) is not None and pid not in passed:
            passed.add(pid)
            yield process
            pid = process.parent

    def listeners(self, pid: int) -> tuple[Listener, ...]:
        """What a process listens on; nothing where that cannot be read."""
        return self._sockets.of(pid) or ()

    def place(
        self, pid: int, said: int | None, default: int | None
    ) -> tuple[str, tuple[int, ...], str] | None:
        """Host, ports and problem of a server: where it says, else where it listens, else the default."""
        found = self.listeners(pid)
        wanted = [said] if said is not None else _likely(found, default)
        if not wanted or not all(map(is_port, wanted)):
            return None
        if self._sockets.elsewhere(pid):
            return self._published_at(pid, wanted)
        hosts = {one.host for one in found if one.port in wanted}
        if hosts and hosts <= {None}:
            only = ", ".join(sorted({one.address for one in found if one.port in wanted}))
            return only, tuple(wanted), f"it listens on {only} only, and probe asks on loopback: name its url"
        return "[::1]" if hosts == {"[::1]"} else "127.0.0.1", tuple(wanted), ""

    def _published_at(self, pid: int, wanted: list[int]) -> tuple[str, tuple[int, ...], str]:
        """Where a container's ports are on this host's loopback, if Docker publishes them."""
        addresses = self._sockets.addresses(pid)
        ports = [
            self._published[address, port]
            for port in wanted
            for address in addresses
            if (address, port) in self._published
        ]
        if ports:
            return "127.0.0.1", tuple(ports), ""
        why = "it runs in a network namespace of its own (a container): publish its port, or name its url"
        return "127.0.0.1", tuple(wanted), why


def candidates(
    patterns: Mapping[str, tuple[str, ...]],
    seen: Iterable[Process] | None = None,
    *,
    users: Iterable[int] = (),
    sockets: Sockets | None = None,
) -> list[Candidate]:
    """One candidate per (kind, URL): the first process, not the workers that it started.

    `patterns` maps an engine kind to regular expressions on the command line. A process without
    a port of its own below one that was recognised is a worker; any other uses the port it listens on,
    or the kind's default. `users` are the pids of GPU users: where neither such a process nor one above
    it was recognised, what they listen on is asked what it is (kind `auto`).
    """
    compiled = {kind: [re.compile(text) for text in texts] for kind, texts in patterns.items()}
    host = Host(seen, sockets)
    recognised = {
        pid: kind for pid, process in host.processes.items() if (kind := _kind_of(process.command, compiled))
    }
    found: dict[tuple[str, str], Candidate] = {}
    for pid, kind in sorted(recognised.items()):
        candidate = _recognised(host, pid, kind, recognised)
        if candidate is not None:
            found.setdefault((kind, candidate.url), candidate)
    taken = {candidate.url_at(port) for candidate in found.values() for port in candidate.ports}
    for candidate in _gpu_users(host, sorted(set(users)), recognised):
        if candidate.url not in taken:
            taken.add(candidate.url)
            found[UNKNOWN, candidate.url] = candidate
    return list(found.values())


def exporter_urls(seen: Iterable[Process] | None = None, sockets: Sockets | None = None) -> list[str]:
    """Where a dcgm-exporter may be: of its processes, then the usual place."""
    host = Host(seen, sockets)
    ports: list[int] = []
    for pid, process in sorted(host.processes.items()):
        if _EXPORTER.search(process.command):
            said = _EXPORTER_ADDRESS.search(process.command)
            place = host.place(pid, int(said[1]) if said else None, EXPORTER_PORT)
            if place is not None and not place[2]:
                ports += place[1]
    return [f"http://127.0.0.1:{port}/metrics" for port in dict.fromkeys((*ports, EXPORTER_PORT))]


def _recognised(host: Host, pid: int, kind: str, recognised: Mapping[int, str]) -> Candidate | None:
    process = host.processes[pid]
    said = (_METRICS_PORT if kind == "triton" else _PORT).search(process.command)
    above = [each for each in host.chain(pid) if each.pid != pid]
    if said is None and any(each.pid in recognised for each in above):
        return None
    place = host.place(pid, int(said[1]) if said else None, DEFAULT_PORTS.get(kind))
    if place is None:
        return None
    at, ports, problem = place
    return Candidate(pid=pid, kind=kind, ports=ports, command=process.command, host=at, problem=problem)


def _gpu_users(host: Host, users: list[int], recognised: Mapping[int, str]) -> Iterator[Candidate]:
    """What GPU users without a known command line, or those above them, listen on."""
    for user in users:
        chain = list(host.chain(user))
        if any(process.pid in recognised for process in chain):
            continue
        for process in chain:
            if process.pid == 1 or _SUPERVISORS.search(process.command.partition(" ")[0]):
                break
            for listener in host.listeners(process.pid)[:MAX_PORTS]:
                place = host.place(process.pid, listener.port, None)
                if place is not None:
                    at, ports, problem = place
                    yield Candidate(
                        pid=process.pid,
                        kind=UNKNOWN,
                        ports=ports,
                        command=process.command,
                        host=at,
                        problem=problem,
                    )


def _likely(found: tuple[Listener, ...], default: int | None) -> list[int]:
    """Ports in the order to ask: the default where it is one of them, or where nothing is known."""
    ports = [one.port for one in found]
    first = [default] if default is not None and (default in ports or not ports) else []
    return list(dict.fromkeys((*first, *ports)))[:MAX_PORTS]


def _kind_of(command: str, compiled: Mapping[str, list[re.Pattern[str]]]) -> str | None:
    for kind, expressions in compiled.items():
        if any(expression.search(command) for expression in expressions):
            return kind
    return None
