"""`kvwatch probe`: what can be seen from here, what cannot and why, and a configuration for it."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvwatch.cli import EXIT_OK, EXIT_USAGE
from kvwatch.config import units
from kvwatch.model.gpu import GpuState, HostGpus
from kvwatch.model.server import ServerState
from kvwatch.model.settings import GpuSettings, ServerSettings
from kvwatch.sources import discovery
from kvwatch.sources.base import Source, SourceError

GPU_DEADLINE_S = 20.0
SLOW_READER_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One server that was looked at: what answered, or why nothing useful did."""

    settings: ServerSettings
    pid: int
    state: ServerState | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything that one probe saw."""

    gpus: HostGpus | None
    gpu_problem: str
    servers: tuple[Found, ...]


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
        print("\n".join(_as_text(seen)))
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


def discover_servers() -> list[ServerSettings]:
    """The servers that answer as their command lines promise; discovered, so their absence alarms nobody."""
    return [found.settings for found in _look_at_servers() if found.state is not None]


def look() -> Seen:
    """One pass over GPUs and servers."""
    gpus, problem = _look_at_gpus()
    return Seen(gpus=gpus, gpu_problem=problem, servers=tuple(_look_at_servers()))


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


def _look_at_servers() -> Iterator[Found]:
    from kvwatch.sources.servers import registry

    kinds = [kind for kind in registry.kinds() if kind not in ("auto", "mapped")]  # these are no engines
    patterns = {kind: registry.process_patterns(kind) for kind in kinds}
    taken: set[str] = set()
    for candidate in discovery.candidates(patterns):
        name = _name(candidate, taken)
        settings = ServerSettings(name=name, kind=candidate.kind, url=candidate.url, configured=False)
        source = registry.create(settings)
        try:
            state, problem = source.poll(), ""
        except SourceError as error:
            state, problem = None, str(error)
        finally:
            source.close()
        yield Found(settings=settings, pid=candidate.pid, state=state, problem=problem)


def _name(candidate: discovery.Candidate, taken: set[str]) -> str:
    name = f"{candidate.kind}-{candidate.port}"
    taken.add(name)
    return name


def _as_text(seen: Seen) -> Iterator[str]:
    if seen.gpus is None:
        yield f"GPUs: none readable: {seen.gpu_problem}"
    else:
        yield f"GPUs: {len(seen.gpus.gpus)} (driver {seen.gpus.driver_version or 'unknown'})"
        for gpu in seen.gpus.gpus:
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
    for process in (gpu.ledger_pass.processes or ()) if gpu.ledger_pass else ():
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
        "servers": [
            {
                "name": found.settings.name,
                "kind": found.settings.kind,
                "url": found.settings.url,
                "pid": found.pid,
                "model": found.state.model if found.state else None,
                "engines": len(found.state.engines) if found.state else None,
                "problem": found.problem or None,
            }
            for found in seen.servers
        ],
    }


def as_config(seen: Seen) -> str:
    """A commented configuration for what was found; `kvwatch check` accepts it as it is."""
    lines = ["# Written by `kvwatch probe`. Every key and its default: docs/config.md", "gpus:"]
    if seen.gpus is None:
        lines += [f"  # {_one_line(seen.gpu_problem)}", "  source: auto"]
    else:
        lines += ["  source: auto", f"  expect: {len(seen.gpus.gpus)}"]
    answering = [found for found in seen.servers if found.state is not None]
    lines.append("servers:" if answering else "servers: []")
    for found in answering:
        lines += [
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


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:300]


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
