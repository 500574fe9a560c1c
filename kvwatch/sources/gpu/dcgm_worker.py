"""The process that talks to a DCGM host engine.

`python -m kvwatch.sources.gpu.dcgm_worker LOCK TICK_S PARENT_PID MODE BINDINGS ADDRESS PROFILING MAX_RSS`

A process of its own because calls have blocked for 45 s and more, the vendor's library has leaked,
and its bindings may end the interpreter at import. It writes JSON lines in the dialect of the NVML
worker and ends when stdin closes, when the connection is lost, or when it has grown too large; the
parent starts the next one. TERM ends it even inside a call: only the engine talks to the driver.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import sys
import time
from json import JSONEncoder
from typing import Any

from kvwatch.sources.gpu import dcgm_fields as fields
from kvwatch.sources.gpu.dcgm_reader import (
    GPU_INSTANCE,
    DcgmCallError,
    Engine,
    EngineGoneError,
    Entity,
    profile_of,
)

EXIT_GONE, EXIT_LOCKED, EXIT_LARGE = 3, 4, 5
ADDRESS_SPACE_BYTES = 4 << 30  # the library maps little; a leak ends here at the latest
GOOD_PROFILE_S = 600.0
MEMORY_ORDER = (fields.FB_TOTAL, fields.FB_USED, fields.FB_FREE, fields.FB_RESERVED)
_encode = JSONEncoder(separators=(",", ":")).encode


def say(message: dict[str, Any]) -> None:
    """Write one line; a closed pipe ends the process through BrokenPipeError."""
    data = (_encode(message) + "\n").encode()
    while data:
        data = data[os.write(1, data) :]


class Worker:
    """Memory once a tick (1 s), everything else every ten seconds."""

    def __init__(self, engine: Engine, max_rss_bytes: int) -> None:
        self._engine = engine
        self._tick_s = engine.every_s
        self._max_rss_bytes = max_rss_bytes
        self._slow_due_s = 0.0
        self._facts: dict[str, Any] = {}
        self._blank_since_s: dict[tuple[int, int], float] = {}

    def run(self) -> None:
        """Work until stdin closes or the engine is gone."""
        inbox = select.poll()
        inbox.register(0, select.POLLIN | select.POLLHUP | select.POLLERR)
        due_s = time.monotonic()
        while True:
            self._tick(time.monotonic())
            due_s = max(due_s + self._tick_s, time.monotonic())
            if inbox.poll(max(0.0, due_s - time.monotonic()) * 1000) and not os.read(0, 4096):
                return

    def _tick(self, now_s: float) -> None:
        slow = now_s >= self._slow_due_s
        changed = slow and self._engine.enumerate()
        self._engine.read_memory()
        if any(one.code == fields.BAD_PARAMETER for one in self._engine.entities):
            changed = self._engine.enumerate() or changed  # MIG was reconfigured under us
            self._engine.read_memory()
        if slow or changed:
            self._slow_due_s = now_s + self._engine.slow_every_s
            self._engine.read_slow()
            self._watch_blanks(now_s)
            self._refuse_growth()
        self._send(slow=slow or changed)

    def _send(self, *, slow: bool) -> None:
        entities = self._engine.entities
        facts = self._describe()
        if facts != self._facts:
            self._facts = facts
            say({"facts": facts})
        message: dict[str, Any] = {"s": round(time.monotonic(), 4), "g": self._rows(entities)}
        if slow:
            message["x"] = {number: slow_values(one) for number, one in enumerate(entities)}
        stale = [one.stale_s for one in entities if one.stale_s is not None]
        if stale and len(stale) == len(entities):
            message["stale"] = round(min(abs(age) for age in stale), 1)
        say(message)

    def _rows(self, entities: list[Entity]) -> list[list[Any]]:
        rows = []
        for number, entity in enumerate(entities):
            memory = fields.memory_row(*(entity.number(field) for field in MEMORY_ORDER))
            if memory is None or health_of(entity) != "ok":
                continue
            rows.append([number, *memory, memory[1], memory[2], self._tick_s, *busy_of(entity), 0.0])
        return rows

    def _describe(self) -> dict[str, Any]:
        """Facts of every entity; the identity of an instance is its parent's with the instance id."""
        entities = self._engine.entities
        parents = {one.gpu_id: one for one in entities if one.key[0] != GPU_INSTANCE}
        driver = next((one.text(fields.DRIVER_VERSION) for one in parents.values()), "")
        return {
            "driver": driver or self._facts.get("driver", ""),
            "host_pids": False,
            "memory_only": False,
            "gpus": [self._describe_one(one, parents[one.gpu_id]) for one in entities],
        }

    def _describe_one(self, entity: Entity, parent: Entity) -> dict[str, Any]:
        instance = entity.key[0] == GPU_INSTANCE
        uuid = parent.text(fields.UUID) or parent.uuid
        parent.uuid = uuid
        index = parent.number(fields.NVML_INDEX)
        name = parent.text(fields.NAME) or parent.name
        parent.name = name
        health = health_of(entity)
        reserved = entity.number(fields.FB_RESERVED)
        return {
            "uuid": f"MIG-{uuid}/{entity.instance}" if instance and uuid else uuid,
            "index": parent.gpu_id if index is None else int(index),
            "name": name,
            "health": health,
            "detail": detail_of(entity) if health != "ok" else "",
            "mig_profile": profile_of(entity.text(fields.NAME)) if instance else "",
            "v1": entity.number(fields.FB_TOTAL) is not None and reserved is None,
            "parent_uuid": uuid if instance else "",
            "is_mig_parent": entity.is_mig_parent,
            "missing": sorted(entity.missing),
        }

    def _watch_blanks(self, now_s: float) -> None:
        """Profiling values that have stayed blank for ten minutes are a capability that was lost."""
        for entity in self._engine.entities:
            if not self._engine.profiling or entity.number(fields.ENGINE_ACTIVE) is not None:
                self._blank_since_s.pop(entity.key, None)
                entity.missing.discard(fields.PROFILING_BLANK)
            elif now_s - self._blank_since_s.setdefault(entity.key, now_s) >= GOOD_PROFILE_S:
                entity.missing.add(fields.PROFILING_BLANK)

    def _refuse_growth(self) -> None:
        grown = rss_bytes()
        if grown > self._max_rss_bytes:
            why = f"the DCGM worker has grown to {grown >> 20} MiB and is replaced (the library leaks)"
            say({"bye": "large", "code": 0, "why": why})
            sys.exit(EXIT_LARGE)


def health_of(entity: Entity) -> str:
    """The state of a GPU: by the status of its reading, by the engine's own view, by its age."""
    state = fields.health(entity.code)
    if state == "ok":
        state = fields.ENTITY_HEALTH.get(entity.status_code, "ok")
    if state == "ok" and entity.stale_s is not None:
        return "unknown"
    if state == "ok" and entity.code == fields.BAD_PARAMETER:
        return "unknown"
    # A MIG parent's memory needs a privilege that nobody misses: its instances are read on their own.
    return "ok" if state == "denied" and entity.is_mig_parent else state


def detail_of(entity: Entity) -> str:
    """Why it is not well, in a sentence."""
    if entity.code and (fields.health(entity.code) != "ok" or entity.code == fields.BAD_PARAMETER):
        return fields.explain(entity.code)
    if entity.status_code in fields.ENTITY_HEALTH:
        return f"the host engine calls this GPU {fields.ENTITY_WORDS[entity.status_code]}"
    return f"the host engine's newest value is {entity.stale_s or 0:.0f} s old"


def busy_of(entity: Entity) -> tuple[float | None, float | None]:
    """(busy, memory bandwidth) in percent; on MIG only profiling can tell, where it is switched on."""
    active = entity.number(fields.ENGINE_ACTIVE)
    profiled = None if active is None or not 0 <= active <= 1 else 100 * active
    if entity.key[0] == GPU_INSTANCE:
        return profiled, None
    if entity.is_mig_parent:
        return None, None
    busy = entity.number(fields.GPU_UTIL)
    return profiled if busy is None else busy, entity.number(fields.BANDWIDTH_UTIL)


def slow_values(entity: Entity) -> dict[str, Any]:
    """Slow values and how busy it is; what is not reported is left out."""
    busy = busy_of(entity)
    values = fields.slow_values(entity.number)
    return values if busy == (None, None) else {**values, "busy": list(busy)}


def rss_bytes() -> int:
    """Resident memory of this process (0 where /proc cannot be read)."""
    try:
        with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123 - pathlib costs a megabyte here
            return int(statm.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def take_lock(path: str) -> int | None:
    """Hold the lock for the life of this process; the descriptor, or None where another worker has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say(
            {
                "bye": "locked",
                "code": 0,
                "why": f"another DCGM worker holds {path}; a second one is not started",
            }
        )
        return None
    return descriptor


def confine(parent: int) -> None:
    """End with the parent, at TERM even inside a call, and before memory is exhausted."""
    import ctypes

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pr_set_pdeathsig, pr_set_name = 1, 15
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
    libc.prctl(pr_set_name, b"kvwatch-dcgm")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if parent and os.getppid() != parent:
        sys.exit(0)


def load(folder: str) -> tuple[Any, Any]:
    """The bindings from a folder, appended to the path: its modules have general names.

    They print and exit where they dislike the interpreter, so everything is caught; what they print
    must not get between our lines.
    """
    sys.path.append(folder)
    sys.dont_write_bytecode = True
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        import dcgm_agent
        import dcgm_structs
    except (Exception, SystemExit) as error:
        why = f"the DCGM bindings in {folder} cannot be imported: {error!r}"
        raise EngineGoneError(fields.LIBRARY_NOT_FOUND, why) from error
    finally:
        sys.stdout = stdout
    return dcgm_structs, dcgm_agent


def serve(folder: str, address: str, tick_s: float, *, profiling: bool, max_rss_bytes: int) -> None:
    """Connect, work, let go."""
    structs, agent = load(folder)
    say({"hello": {"pid": os.getpid(), "bindings_path": folder, "address": address}})
    engine = Engine(structs, agent, address, every_s=tick_s, profiling=profiling)
    engine.connect()
    Worker(engine, max_rss_bytes).run()
    engine.disconnect()


def main(lock: str, tick: str, parent: str, _mode: str, *rest: str) -> int:
    """Run the worker; the exit status says why it ended (0 asked to, 3 gone, 4 locked, 5 too large)."""
    folder, address, profiling, max_rss = rest
    confine(int(parent))
    if lock and take_lock(lock) is None:
        return EXIT_LOCKED
    try:
        serve(folder, address, float(tick), profiling=profiling == "profiling", max_rss_bytes=int(max_rss))
    except (EngineGoneError, DcgmCallError) as gone:
        say({"bye": "gone", "code": gone.code, "why": str(gone)})
        return EXIT_GONE
    except BrokenPipeError:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
