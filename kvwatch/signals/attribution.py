"""Which server does a GPU process belong to? Decided from what an unprivileged watcher can read.

In this order: the server's `match`, on the process or an ancestor; a command line (its own or an
ancestor's) that is of the server's kind and carries the port of its URL; the only server of a kind whose
pattern matches. Otherwise nobody's. A dead pid is nobody's. `gpus` restricts each of these.

A process of the right kind with *another* port is believed to be the server's only inside a container,
where ports are mapped, and only if no other process carries the right one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from kvwatch.model.gpu import GpuProcess, GpuState
from kvwatch.model.settings import MatchSettings, ServerSettings

_PORT = re.compile(r"(?:^|\s)--port(?:=|\s+)(\d{1,5})(?=\s|$)")
_URL = re.compile(r"^(\w+)://(?:[^/@]*@)?(?:\[[^\]]*\]|[^/:?#]*)(?::(\d+))?")
_CONTAINER = re.compile(r"docker|containerd|kubepods|libpod|crio|lxc|machine\.slice")

Command = tuple[str, str, tuple[tuple[int, str], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One server as attribution sees it."""

    name: str
    kind: str
    port: int | None
    match: MatchSettings
    gpus: tuple[str, ...]

    @property
    def has_match(self) -> bool:
        """Whether the configuration says how its processes look."""
        return bool(self.match.unit or self.match.cgroup or self.match.cmdline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a process's command lines say: kinds recognised, and the ports that stand beside them."""

    kinds: frozenset[str]
    ports: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOwners:
    """The processes of one GPU's pass (each pid once) with the server of each, "" if nobody's."""

    processes: tuple[tuple[GpuProcess, str], ...] | None
    servers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Owners per GPU, GPUs per server, and what was read from command lines (kept for the next pass)."""

    gpus: Mapping[str, GpuOwners] = field(default_factory=dict)
    uuids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    facts: Mapping[Command, Facts] = field(default_factory=dict)


def port_of(url: str) -> int | None:
    """The port a URL leads to, the scheme's default where it names none; None if it is no URL."""
    found = _URL.match(url)
    if found is None:
        return None
    return int(found[2]) if found[2] else {"http": 80, "https": 443}.get(found[1].lower())


def candidates(servers: Sequence[ServerSettings], kinds: Mapping[str, str]) -> tuple[Candidate, ...]:
    """The servers to choose from; `kinds` has what a server of kind `auto` turned out to be."""
    return tuple(
        Candidate(
            name=server.name,
            kind=kinds.get(server.name, server.kind) if server.kind == "auto" else server.kind,
            port=port_of(server.url),
            match=server.match,
            gpus=server.gpus,
        )
        for server in servers
    )


def on_gpu(specs: Sequence[str], gpu: GpuState) -> bool:
    """Whether one of the specs (index, UUID or UUID prefix) names this GPU or the parent of this instance."""
    return any(_names(spec, gpu) for spec in specs)


def _names(spec: str, gpu: GpuState) -> bool:
    if spec.isascii() and spec.isdigit():
        return int(spec) == gpu.index
    wanted = spec.lower()
    return bool(wanted) and (
        gpu.uuid.lower().startswith(wanted) or gpu.parent_uuid.lower().startswith(wanted)
    )


def attribute(
    servers: Sequence[Candidate],
    patterns: Mapping[str, tuple[str, ...]],
    gpus: Sequence[GpuState],
    known: Mapping[Command, Facts],
    told: Mapping[str, frozenset[str]],
) -> Attribution:
    """Attribute every process of every GPU's last pass.

    `known` are the facts of the pass before; `told` has the GPUs that each server's agents say they use.
    """
    facts: dict[Command, Facts] = {}
    listed = {gpu.uuid: _processes(gpu) for gpu in gpus}
    for process in chain.from_iterable(found for found in listed.values() if found is not None):
        key = _key(process)
        if key not in facts:
            facts[key] = known.get(key) or _facts(process, patterns)
    pairs = {pair for one in facts.values() for pair in one.ports}
    claimed = {one.name for one in servers if not one.has_match and (one.kind, one.port) in pairs}
    owners = {
        gpu.uuid: _owners(
            listed[gpu.uuid], _allowed(servers, gpu), facts, claimed, _pinned(servers, gpu, told)
        )
        for gpu in gpus
    }
    uuids = {
        candidate.name: tuple(uuid for uuid, owner in owners.items() if candidate.name in owner.servers)
        for candidate in servers
    }
    return Attribution(gpus=owners, uuids=uuids, facts=facts)


def _key(process: GpuProcess) -> Command:
    return process.name, process.command, process.ancestors


def _allowed(servers: Sequence[Candidate], gpu: GpuState) -> list[Candidate]:
    return [candidate for candidate in servers if not candidate.gpus or on_gpu(candidate.gpus, gpu)]


def _pinned(servers: Sequence[Candidate], gpu: GpuState, told: Mapping[str, frozenset[str]]) -> set[str]:
    """Servers that are on this GPU whatever its processes: by configuration, or by their agents' word."""
    if gpu.is_mig_parent:
        return set()
    return {one.name for one in servers if on_gpu(one.gpus, gpu) or gpu.uuid in told.get(one.name, ())}


def _owners(
    processes: Sequence[GpuProcess] | None,
    allowed: Sequence[Candidate],
    facts: Mapping[Command, Facts],
    claimed: set[str],
    pinned: set[str],
) -> GpuOwners:
    owned = None
    if processes is not None:
        owned = tuple(
            (process, _owner(process, facts[_key(process)], allowed, claimed)) for process in processes
        )
    here = pinned | {server for _, server in owned or () if server}
    return GpuOwners(processes=owned, servers=tuple(sorted(here)))


def _processes(gpu: GpuState) -> tuple[GpuProcess, ...] | None:
    """Each pid of the last pass once: one that is listed as compute and graphics holds its memory once."""
    if gpu.ledger_pass is None or gpu.ledger_pass.processes is None:
        return None
    by_pid: dict[int, GpuProcess] = {}
    for process in gpu.ledger_pass.processes:
        other = by_pid.get(process.pid)
        if other is None or (other.used_bytes or 0) < (process.used_bytes or 0):
            by_pid[process.pid] = process
    return tuple(by_pid.values())


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except re.error:
        return None


def _is_kind(line: str, patterns: Iterable[str]) -> bool:
    return any(compiled.search(line) for compiled in map(_compiled, patterns) if compiled is not None)


def _facts(process: GpuProcess, patterns: Mapping[str, tuple[str, ...]]) -> Facts:
    """Read the kinds and ports from a process's own command line (or title) and its ancestors'."""
    kinds: set[str] = set()
    ports: set[tuple[str, int]] = set()
    for line in (process.command or process.name, *(command for _, command in process.ancestors)):
        here = [kind for kind, of_kind in patterns.items() if line and _is_kind(line, of_kind)]
        kinds.update(here)
        ports.update((kind, int(port)) for kind in here for port in _PORT.findall(line))
    return Facts(kinds=frozenset(kinds), ports=frozenset(ports))


def _owner(process: GpuProcess, facts: Facts, allowed: Sequence[Candidate], claimed: set[str]) -> str:
    if process.alive is False:
        return ""
    matched = [one for one in allowed if one.has_match and _matches(one.match, process)]
    if matched:
        return _single([one for one in matched if _port_stands(one, facts)] or matched)
    by_port = [one for one in allowed if _by_port(one, facts)]
    if by_port:
        return _single(by_port)
    of_kind = [one for one in allowed if not one.has_match and one.kind in facts.kinds]
    return _single([one for one in of_kind if _port_may_differ(one, process, facts, claimed)], of_kind)


def _single(found: Sequence[Candidate], among: Sequence[Candidate] | None = None) -> str:
    """The only server found; "" when there is none or a choice."""
    return found[0].name if len(found) == 1 and len(among or found) == 1 else ""


def _port_stands(candidate: Candidate, facts: Facts) -> bool:
    return (candidate.kind, candidate.port) in facts.ports


def _by_port(candidate: Candidate, facts: Facts) -> bool:
    return not candidate.has_match and _port_stands(candidate, facts)


def _port_may_differ(candidate: Candidate, process: GpuProcess, facts: Facts, claimed: set[str]) -> bool:
    """Whether the ports on the command line allow this server: none at all, or mapped by a container."""
    if not any(kind == candidate.kind for kind, _ in facts.ports):
        return True
    return candidate.name not in claimed and _CONTAINER.search(process.cgroup) is not None


def _matches(match: MatchSettings, process: GpuProcess) -> bool:
    """Whether the configured unit, cgroup part or command-line part is this process's or an ancestor's."""
    if match.unit and (_is_unit(match.unit, process.unit) or _in_path(match.unit, process.cgroup)):
        return True
    if match.cgroup and match.cgroup in process.cgroup:
        return True
    wanted = match.cmdline
    if not wanted:
        return False
    return wanted in process.command or any(wanted in command for _, command in process.ancestors)


def _is_unit(wanted: str, unit: str) -> bool:
    return unit in (wanted, f"{wanted}.service")


def _in_path(wanted: str, cgroup: str) -> bool:
    return any(_is_unit(wanted, part) for part in cgroup.split("/"))


def held_bytes(owners: GpuOwners, server: str) -> int | None:
    """What a server's processes hold on one GPU; None where the list or one of the sizes is unknown."""
    if owners.processes is None:
        return None
    sizes = [process.used_bytes for process, owner in owners.processes if owner == server]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
