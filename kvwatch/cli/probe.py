"""`kvwatch probe`: what can be seen from here, what cannot and why, and a configuration for it."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvwatch.cli import EXIT_OK, EXIT_USAGE
from kvwatch.config import units
from kvwatch.daemon.poller import poll_once
from kvwatch.model.gpu import GpuProcess, GpuState, HostGpus
from kvwatch.model.server import ServerState
from kvwatch.model.settings import GpuSettings, ServerSettings
from kvwatch.sources import discovery
from kvwatch.sources.base import Source, SourceError
from kvwatch.wire_exec import printable

GPU_DEADLINE_S = 20.0
SLOW_READER_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One server that was looked at: what answered, or why nothing useful did.

    `gpus` are (index, UUID) of the GPUs that it or a process it started uses.
    """

    settings: ServerSettings
    pid: int
    state: ServerState | None
    problem: str = ""
    gpus: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """A dcgm-exporter that answered: where, and the GPUs on its page."""

    url: str
    gpus: HostGpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything that one probe saw. `gpus` are NVML's."""

    gpus: HostGpus | None
    gpu_problem: str
    servers: tuple[Found, ...]
    exporter: Exporter | None = None

    @property
    def known_gpus(self) -> HostGpus | None:
        """NVML's GPUs, else those of a dcgm-exporter."""
        return self.exporter.gpus if self.gpus is None and self.exporter is not None else self.gpus


def main(args: argparse.Namespace) -> int:
    """Look once (or for `--watch`), print, and write a configuration when asked."""
    if args.watch:
        try:
            return _watch(units.duration_s(args.watch), as_json=args.json)
        except ValueError as error:
            print(f"kvwatch: --watch: {error}", file=sys.stderr)
            return EXIT_USAGE
    seen = look()
    if args.json:
        print(json.dumps(_as_json(seen), indent=2))
    else:
        # Processes and servers choose their names: none of them shall speak to the terminal.
        print("\n".join(printable(line) for line in _as_text(seen)))
    if args.write:
        try:
            with Path(args.write).open("x", encoding="utf-8") as stream:
                stream.write(as_config(seen))
        except FileExistsError:
            print(f"kvwatch: {args.write} exists and is left as it is; name another file", file=sys.stderr)
            return EXIT_USAGE
        except OSError as error:
            print(f"kvwatch: {args.write}: {error.strerror}", file=sys.stderr)
            return EXIT_USAGE
        print(f"written: {args.write} (check it with `kvwatch check {args.write}`)", file=sys.stderr)
    return EXIT_OK


def look() -> Seen:
    """One pass over GPUs and servers."""
    gpus, problem = _look_at_gpus()
    running = tuple(discovery.processes())
    users = _users(gpus)
    servers = tuple(
        replace(found, gpus=_gpus_of(found.pid, gpus)) for found in look_at_servers(running, users)
    )
    return Seen(gpus=gpus, gpu_problem=problem, servers=servers, exporter=_look_at_exporter(running))


def _users(gpus: HostGpus | None) -> list[int]:
    """Pids of GPU users, where they mean the same here as to the driver."""
    if gpus is None or not gpus.host_pid_namespace:
        return []
    return [process.pid for gpu in gpus.gpus for process in _processes(gpu)]


def _gpus_of(pid: int, gpus: HostGpus | None) -> tuple[tuple[int, str], ...]:
    if gpus is None or not gpus.host_pid_namespace:
        return ()
    return tuple(
        (gpu.index, gpu.uuid)
        for gpu in gpus.gpus
        if any(pid in (each.pid, *(above for above, _ in each.ancestors)) for each in _processes(gpu))
    )


def _processes(gpu: GpuState) -> tuple[GpuProcess, ...]:
    return (gpu.ledger_pass.processes or ()) if gpu.ledger_pass is not None else ()


def _look_at_exporter(running: Iterable[discovery.Process]) -> Exporter | None:
    """The first dcgm-exporter that answers with GPUs, if any."""
    from kvwatch.sources.gpu.dcgm_exporter import DcgmExporterSource

    for url in discovery.exporter_urls(running):
        with tempfile.TemporaryDirectory(prefix="kvwatch-probe-") as folder:
            try:
                source = DcgmExporterSource(GpuSettings(dcgm_exporter_url=url), state_dir=Path(folder))
            except SourceError:
                continue
            try:
                return Exporter(url=url, gpus=source.poll())
            except SourceError:
                continue
            finally:
                source.close()
    return None


def _gpu_source(folder: str) -> Source[HostGpus]:
    from kvwatch.sources.gpu.nvml import NvmlSource

    return NvmlSource(GpuSettings(), runtime_dir=Path(folder), state_dir=Path(folder))


def _look_at_gpus() -> tuple[HostGpus | None, str]:
    with tempfile.TemporaryDirectory(prefix="kvwatch-probe-") as folder:
        source = _gpu_source(folder)
        try:
            return _first_with_processes(source), ""
        except SourceError as error:
            return None, str(error)
        finally:
            source.close()


def _first_with_processes(source: Source[HostGpus]) -> HostGpus:
    """The first reading that includes the process lists, or the best within the deadline."""
    end_s = time.monotonic() + GPU_DEADLINE_S
    reading = source.poll()
    while time.monotonic() < end_s and any(gpu.ledger_pass is None for gpu in reading.gpus if gpu.memory):
        reading = source.poll()
    return reading


def look_at_servers(
    running: Iterable[discovery.Process] | None = None,
    users: Iterable[int] = (),
    wanted: Callable[[discovery.Candidate], bool] = lambda _: True,
    turn: Callable[[discovery.Candidate], float] = lambda _: 0.0,
) -> Iterator[Found]:
    """What answers of the candidates among these processes (all, without); of those that a command line
    tells, also what does not. `users` are pids of GPU users; only a `wanted` candidate is asked, which is
    decided just before; those with the lowest `turn` come first."""
    from kvwatch.sources.servers import registry

    kinds = [kind for kind in registry.kinds() if kind not in ("auto", "mapped")]  # these are no engines
    patterns = {kind: registry.process_patterns(kind) for kind in kinds}
    candidates = sorted(discovery.candidates(patterns, running, users=users), key=turn)
    for candidate in filter(wanted, candidates):
        found = _ask(candidate)
        if found.state is not None or candidate.kind != discovery.UNKNOWN or candidate.problem:
            yield found


def _ask(candidate: discovery.Candidate) -> Found:
    """The first of a candidate's ports that answers as it should; else what its first one said."""
    if candidate.problem:
        return _found(candidate, candidate.port, candidate.kind, None, candidate.problem)
    told = ""
    for port in candidate.ports:
        state, problem = _poll(candidate, port)
        if state is not None:
            return _found(candidate, port, state.kind, state, "")
        told = told or problem
    return _found(candidate, candidate.port, candidate.kind, None, told)


def _poll(candidate: discovery.Candidate, port: int) -> tuple[ServerState | None, str]:
    from kvwatch.sources.servers import registry

    settings = ServerSettings(name="probe", kind=candidate.kind, url=candidate.url_at(port))
    try:
        source = registry.create(settings)
    except (SourceError, OSError, ImportError) as error:  # OSError: no descriptor left
        return None, str(error)
    try:
        state, failure = poll_once(source)
    finally:
        source.close()
    return state, "" if failure is None else failure.message


def _found(
    candidate: discovery.Candidate, port: int, kind: str, state: ServerState | None, problem: str
) -> Found:
    url = candidate.url_at(port)
    # Two servers may have the same port, one of them on [::1] alone.
    where = "-ip6" if candidate.host == "[::1]" else ""
    settings = ServerSettings(name=f"{kind}{where}-{port}", kind=kind, url=url, configured=False)
    return Found(settings=settings, pid=candidate.pid, state=state, problem=problem)


def _as_text(seen: Seen) -> Iterator[str]:
    if seen.gpus is None:
        yield f"GPUs: none readable: {seen.gpu_problem}"
    else:
        yield f"GPUs: {len(seen.gpus.gpus)} (driver {seen.gpus.driver_version or 'unknown'})"
        for gpu in seen.gpus.gpus:
            yield from _gpu_lines(gpu)
    if seen.exporter is not None:
        yield f"dcgm-exporter at {seen.exporter.url}: {len(seen.exporter.gpus.gpus)} GPUs and MIG instances"
        for gpu in seen.exporter.gpus.gpus if seen.gpus is None else ():
            yield from _gpu_lines(gpu)
    if not seen.servers:
        yield "servers: none recognised among the processes that can be read here"
    for found in seen.servers:
        yield from _server_lines(found)


def _gpu_lines(gpu: GpuState) -> Iterator[str]:
    memory = gpu.memory
    fill = (
        "memory not readable"
        if memory is None
        else (
            f"{memory.used_bytes / 2**30:.1f} of {memory.total_bytes / 2**30:.1f} GiB used"
            f" ({memory.accounting.value})"
        )
    )
    yield f"  {gpu.index}: {gpu.name or 'unknown'} {gpu.uuid}: {gpu.health.value}, {fill}"
    for process in _processes(gpu):
        used = "?" if process.used_bytes is None else f"{process.used_bytes / 2**30:.1f} GiB"
        told = process.command[:80] or process.name or "not visible from here"
        yield f"     pid {process.pid}: {used}  {told}"
    if gpu.capabilities_missing:
        yield f"     not supported here: {', '.join(gpu.capabilities_missing)}"


def _server_lines(found: Found) -> Iterator[str]:
    place = f"{found.settings.kind} at {found.settings.url} (pid {found.pid})"
    if found.state is None:
        yield f"server {place}: {found.problem}"
        return
    yield f"server {place}: {found.state.model or 'model unknown'} {found.state.version}".rstrip()
    if found.gpus:
        yield f"  uses {_gpu_names(found)}"
    for engine in found.state.engines:
        known = {
            "usage": engine.kv.usage_ratio,
            "capacity (tokens)": engine.kv.capacity_tokens,
            "running": engine.scheduler.running,
            "waiting": engine.scheduler.waiting,
            "preemptions": engine.scheduler.preemptions_total,
        }
        told = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
        lacks = ", ".join(name for name, value in known.items() if value is None)
        yield f"  engine {engine.engine}: {told or 'nothing yet'}" + (
            f"; not reported: {lacks}" if lacks else ""
        )
    for note in found.state.notes:
        yield f"  {note}"


def _gpu_names(found: Found) -> str:
    return ", ".join(f"GPU {index} ({uuid})" for index, uuid in found.gpus)


def _as_json(seen: Seen) -> dict[str, Any]:
    return {
        "gpus": None
        if seen.gpus is None
        else [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "health": gpu.health.value,
                "total_bytes": None if gpu.memory is None else gpu.memory.total_bytes,
                "used_bytes": None if gpu.memory is None else gpu.memory.used_bytes,
            }
            for gpu in seen.gpus.gpus
        ],
        "gpu_problem": seen.gpu_problem or None,
        "dcgm_exporter": None
        if seen.exporter is None
        else {"url": seen.exporter.url, "gpus": [gpu.uuid for gpu in seen.exporter.gpus.gpus]},
        "servers": [
            {
                "name": found.settings.name,
                "kind": found.settings.kind,
                "url": found.settings.url,
                "pid": found.pid,
                "model": found.state.model if found.state else None,
                "engines": len(found.state.engines) if found.state else None,
                "gpus": [uuid for _, uuid in found.gpus],
                "problem": found.problem or None,
            }
            for found in seen.servers
        ],
    }


def as_config(seen: Seen) -> str:
    """A commented configuration for what was found; `kvwatch check` accepts it as it is."""
    lines = ["# Written by `kvwatch probe`. Every key and its default: docs/config.md", *_gpu_config(seen)]
    answering = [found for found in seen.servers if found.state is not None]
    lines.append("servers:" if answering else "servers: []")
    for found in answering:
        lines += [
            *([f"  # on {_gpu_names(found)}"] if found.gpus else []),
            f"  - name: {found.settings.name}",
            f"    kind: {found.settings.kind}",
            f"    url: {found.settings.url}",
            "    # slo: {ttft_p95: 2s, tpot_p95: 60ms}   # state your objectives: latency alarms need them",
        ]
    for found in seen.servers:
        if found.state is None:
            lines.append(f"  # {found.settings.kind} at {found.settings.url}: {_one_line(found.problem)}")
    lines += ["control:", "  mode: advise", ""]
    return "\n".join(lines)


def _gpu_config(seen: Seen) -> Iterator[str]:
    """NVML where it can be read; a dcgm-exporter that was found stands in where it cannot."""
    yield "gpus:"
    if seen.gpus is None:
        yield f"  # {_one_line(seen.gpu_problem)}"
    yield "  source: auto"
    if seen.exporter is not None:
        yield "  # A dcgm-exporter answers there: it stands in while NVML cannot be read."
        yield f"  dcgm_exporter_url: {seen.exporter.url}"
    if seen.known_gpus is not None:
        whole = [gpu for gpu in seen.known_gpus.gpus if not gpu.parent_uuid]
        yield f"  expect: {len(whole)}"


def _one_line(text: str) -> str:
    return printable(re.sub(r"\s+", " ", text))[:300]


def _watch(for_s: float, *, as_json: bool) -> int:
    """Sample for a while; print what a reader of last values every 15 s would have missed."""
    worst: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="kvwatch-probe-") as folder:
        source = _gpu_source(folder)
        end_s = time.monotonic() + for_s
        slow_due_s = 0.0
        try:
            while time.monotonic() < end_s:
                reading = source.poll()
                now_s = time.monotonic()
                slow = now_s >= slow_due_s
                slow_due_s = now_s + SLOW_READER_S if slow else slow_due_s
                for gpu in reading.gpus:
                    _note(worst, gpu, slow=slow)
                _progress(end_s - now_s)
        except SourceError as error:
            print(f"GPUs: {error}", file=sys.stderr)
            return EXIT_OK if worst else EXIT_USAGE
        finally:
            source.close()
    _tell_watch(worst, for_s, as_json=as_json)
    return EXIT_OK


def _note(worst: dict[str, dict[str, float]], gpu: GpuState, *, slow: bool) -> None:
    if gpu.memory is None or gpu.used_peak_bytes is None:
        return
    entry = worst.setdefault(gpu.uuid, {"peak_bytes": 0, "slow_peak_bytes": 0, "hidden_bytes": 0})
    entry["peak_bytes"] = max(entry["peak_bytes"], gpu.used_peak_bytes)
    if slow:
        entry["slow_peak_bytes"] = max(entry["slow_peak_bytes"], gpu.memory.used_bytes)
    entry["hidden_bytes"] = max(entry["hidden_bytes"], gpu.hidden_from_15s_bytes or 0)


def _progress(left_s: float) -> None:
    """Long work shows progress on a terminal and none in a pipe."""
    if sys.stderr.isatty():
        print(f"\r{left_s:5.0f} s left ", end="", file=sys.stderr, flush=True)


def _tell_watch(worst: dict[str, dict[str, float]], for_s: float, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"seconds": for_s, "gpus": worst}, indent=2))
        return
    for uuid, entry in worst.items():
        print(
            f"{uuid}: peak {entry['peak_bytes'] / 2**30:.2f} GiB; a reader every 15 s saw at most "
            f"{entry['slow_peak_bytes'] / 2**30:.2f} GiB; in the worst 15 s it missed "
            f"{entry['hidden_bytes'] / 2**30:.2f} GiB"
        )
