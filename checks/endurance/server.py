"""A vLLM server that fails as it is told: `python -m checks.endurance.server KIND` (scripted, simulated).

Standard input: JSON lines, {"fault": name or ""}, {"set": {figures}}, {"restart": true}; its end is ours.
Standard output: {"port": n} first, then one line for every page that goes out whole, *before* its first
byte: the figures on it and when. So whoever reads along knows everything that can have been believed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from checks.endurance.process import die_with_parent

LABELS = 'engine="0",model_name="m"'
HUGE_BYTES = 48 * 1024 * 1024
FAULTS = (
    "down", "hang", "slow", "drip", "error", "redirect", "truncated", "huge", "garbage", "nan", "duplicates",
    "nameless", "absurd", "closing",
)  # fmt: skip
_FIGURES = {
    "usage": "kv_cache_usage_perc",
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "preemptions": "num_preemptions_total",
}


class Scripted:
    """A page whose figures are set from outside; the token counters move by themselves."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {"usage": 0.5, "running": 10, "waiting": 0, "preemptions": 0}
        self._tokens = 0
        self._started_wall_s = time.time() - 3600

    def page(self) -> str:
        """The page as it is now."""
        self._tokens += 100
        rows = [(name, self.figures[key]) for key, name in _FIGURES.items()]
        rows += [("prompt_tokens_total", self._tokens), ("generation_tokens_total", 2 * self._tokens)]
        lines = []
        for name, value in rows:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{LABELS}}} {float(value)}"]
        lines.append('vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1001"} 1.0')
        lines.append(f"process_start_time_seconds {self._started_wall_s}")
        return "\n".join(lines) + "\n"

    def restart(self) -> None:
        """Counters begin anew, as after a restart of the engine."""
        self._tokens, self.figures["preemptions"] = 0, 0
        self._started_wall_s = time.time()


class Simulated:
    """vLLM's scheduler under a load that overloads it again and again."""

    figures: dict[str, float]

    def __init__(self) -> None:
        self.figures = {}
        self.restart()

    def page(self) -> str:
        """The page as it is now."""
        return self._world.page()

    def restart(self) -> None:
        """A fresh engine."""
        from kvwatch.lab.demo_script import SCENARIOS
        from kvwatch.lab.demo_world import World

        self._world = World(SCENARIOS["tour"], time.monotonic, time.time)


class Server:
    """Listens while it is not down; one thread a connection."""

    def __init__(self, engine: Scripted | Simulated) -> None:
        self._engine = engine
        self.fault = ""
        self._lock = threading.Lock()  # one page at a time, and one line of output
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self.port = 0
        self.listen()

    def listen(self) -> None:
        """Take the port (again)."""
        if self._listener is not None:
            return
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=16)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self) -> None:
        """Close everything, as a process does that dies."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
            self._listener.close()
            self._listener = None
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def command(self, told: dict[str, object]) -> None:
        """Carry out one line of standard input."""
        with self._lock:
            if isinstance(figures := told.get("set"), dict):
                self._engine.figures |= figures
            if told.get("restart"):
                self._engine.restart()
        if "fault" in told:
            self.fault = str(told["fault"])
            if self.fault == "down":
                self.down()
            else:
                self.listen()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError), connection:
            while path := _request(connection):
                for piece in self._answer(path):
                    connection.sendall(piece)
        self._open.discard(connection)

    def _answer(self, path: str) -> Iterator[bytes]:
        """What goes out for one request, piece by piece; OSError: close instead."""
        if path != "/metrics":
            yield _http(b'{"version":"0.32.0"}')
            return
        fault = self.fault
        bad = _BAD.get(fault)
        if bad is not None:
            yield from bad(self)
            return
        if fault == "slow":
            time.sleep(0.25)
        yield _http(self._page(_CHANGES.get(fault, _unchanged)))
        if fault == "closing":
            raise OSError

    def _page(self, change: Callable[[str], str]) -> bytes:
        """A page that will go out whole; said beforehand."""
        with self._lock:
            page = change(self._engine.page())
            told = {"t": time.monotonic()} | {key: _found(page, name) for key, name in _FIGURES.items()}
            print(json.dumps(told), flush=True)
        return page.encode()

    def unsaid(self) -> bytes:
        """A page of which not all will go out."""
        with self._lock:
            return self._engine.page().encode()


def _request(connection: socket.socket) -> str:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(4096)
        if not more:
            return ""
        data += more
    return data.split(None, 2)[1].decode()


def _http(body: bytes, status: str = "200 OK", fields: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n{fields}\r\n".encode() + body


def _found(page: str, name: str) -> list[float]:
    """Every value of this series on the page that is a sensible number."""
    words = re.findall(rf"(?m)^vllm:{name}\{{[^}}]*\}} (\S+)$", page)
    return [float(word) for word in words if re.fullmatch(r"\d+(\.\d+)?(e-?\d\d)?", word)]


def _hang(server: Server) -> Iterator[bytes]:
    yield b""
    while server.fault == "hang":
        time.sleep(0.05)
    raise OSError


def _drip(server: Server) -> Iterator[bytes]:
    for byte in _http(server.unsaid())[:400]:
        time.sleep(0.05)
        yield bytes([byte])
    raise OSError


def _error(_: Server) -> Iterator[bytes]:
    yield _http(b"out of memory", "500 Internal Server Error")


def _redirect(server: Server) -> Iterator[bytes]:
    yield _http(b"", "302 Found", f"Location: http://127.0.0.1:{server.port}/elsewhere\r\n")


def _truncated(server: Server) -> Iterator[bytes]:
    body = server.unsaid()
    yield _http(body[: len(body) // 2], length=len(body))
    raise OSError


def _huge(_: Server) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n\r\n"
    for _number in range(HUGE_BYTES // 65536):
        yield b"vllm:num_requests_running 1\n" * 2340
    raise OSError


def _garbage(_: Server) -> Iterator[bytes]:
    yield _http(random.randbytes(20_000))


_BAD: dict[str, Callable[[Server], Iterator[bytes]]] = {
    "hang": _hang, "drip": _drip, "error": _error, "redirect": _redirect, "truncated": _truncated,
    "huge": _huge, "garbage": _garbage,
}  # fmt: skip


def _unchanged(page: str) -> str:
    return page


def _valued(word: str) -> Callable[[str], str]:
    """All figures (not the counters of tokens) read this word instead."""
    names = "|".join(_FIGURES.values())
    return lambda page: re.sub(rf"(?m)^(vllm:(?:{names})\{{[^}}]*\}}) \S+$", rf"\1 {word}", page)


def _nameless(page: str) -> str:
    return page.replace("vllm:kv_cache_usage_perc", "vllm:something_else")


_CHANGES: dict[str, Callable[[str], str]] = {
    "nan": _valued("NaN"),
    "absurd": _valued("-1e308"),
    "duplicates": lambda page: page + page,
    "nameless": _nameless,
}


def main(kind: str) -> int:
    """Serve until standard input ends."""
    die_with_parent()
    server = Server(Simulated() if kind == "simulated" else Scripted())
    print(json.dumps({"port": server.port}), flush=True)
    for line in sys.stdin:
        server.command(json.loads(line))
    os._exit(0)  # threads inside faults are not waited for


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
