"""Serves many vLLM pages from one process of its own: every answer is news, and three servers misbehave.

Each healthy server has a model of its own, so that no two have a series in common.

    python -m checks.bench.page_farm PAGE HEALTHY

Ports are free ones, told as one JSON object on stdout. A line on stdin is answered with the longest time
between two whole answers of each healthy port since the last such line; the end of stdin ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

AHEAD_S = 0.2  # after an answer the next page is made
DRIP_S = 0.5  # between two bytes of the dripping server's answer
_VALUE = re.compile(rb"(?m)^(vllm:[^\s{]+)(\{[^\n]*\})? ([0-9.e+-]+)$")
_STILL = (b"_created", b"_info", b"engine_sleep_state")
_OBSERVED_S = 0.05  # how long each made-up observation took; it falls into the buckets from there up


class Page:
    """A recorded page, cut at the values that move. Each rendering is one request further on."""

    def __init__(self, text: bytes) -> None:
        self._fixed: list[bytes] = []
        self._moving: list[tuple[float, float]] = []  # value on the recorded page, growth per rendering
        at = 0
        for found in _VALUE.finditer(text):
            growth = _growth(found[1], found[2] or b"")
            if growth is not None:
                self._fixed.append(text[at : found.start(3)])
                self._moving.append((float(found[3]), growth))
                at = found.end(3)
        self._end = text[at:]

    def render(self, turn: int) -> bytes:
        """The page after `turn` more requests."""
        parts: list[bytes] = []
        for fixed, (value, growth) in zip(self._fixed, self._moving, strict=True):
            moved = 0.3 + turn % 40 / 100 if growth < 0 else value + turn * growth
            parts += (fixed, b"%r" % moved)
        return b"".join((*parts, self._end))


def _growth(name: bytes, labels: bytes) -> float | None:
    """What one more request adds to a series; None: it stands still, below 0: it is the usage gauge."""
    if name.endswith(_STILL):
        return None
    if name.endswith(b"kv_cache_usage_perc"):
        return -1.0
    if name.endswith(b"_bucket"):
        bound = re.search(rb'le="([^"]+)"', labels)
        return 1.0 if bound is not None and float(bound[1]) >= _OBSERVED_S else 0.0
    if name.endswith(b"_sum"):
        return _OBSERVED_S
    return 1.0 if name.endswith((b"_total", b"_count")) else None


class Turns:
    """The pages of one server. The next one is made in advance, as servers of their own would all at once:
    this one process would else keep each waiting for those before it."""

    def __init__(self, page: Page, turn: int) -> None:
        self._page, self._turn = page, turn
        self._next = page.render(turn)

    def take(self) -> bytes:
        """The next page."""
        taken = self._next
        asyncio.get_running_loop().call_later(AHEAD_S, self._make)
        return taken

    def _make(self) -> None:
        self._turn += 1
        self._next = self._page.render(self._turn)


class Server(asyncio.Protocol):
    """One connection to one healthy server; `told` is called after each whole answer."""

    def __init__(self, turns: Turns, told: Callable[[], None]) -> None:
        self._turns, self._told = turns, told
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way to answer."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer one request (the client sends each in one piece)."""
        if data.startswith(b"GET /metrics"):
            self._send(self._turns.take(), b"text/plain; version=0.0.4")
            self._told()
        else:
            self._send(b'{"version":"0.32.0"}', b"application/json")

    def _send(self, body: bytes, kind: bytes) -> None:
        assert self._transport is not None
        head = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: %d\r\ncontent-type: %s\r\n\r\n"
        self._transport.write(head % (len(body), kind) + body)


class Gaps:
    """The longest time between two answers, by port."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._longest: dict[int, float] = {}

    def answered(self, port: int) -> None:
        """Note one answer."""
        now = time.monotonic()
        before = self._last.get(port, now)
        self._last[port] = now
        self._longest[port] = max(self._longest.get(port, 0.0), now - before)

    def take(self) -> dict[int, float]:
        """What was found since the last call; a gap that is under way counts as it is now."""
        now = time.monotonic()
        found = {port: max(self._longest.get(port, 0.0), now - last) for port, last in self._last.items()}
        self._longest = {}
        return found


async def _drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        for byte in b"HTTP/1.1 200 OK\r\ncontent-length: 51960\r\n\r\n" + b"#" * 51960:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(DRIP_S)
    writer.close()


async def _hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        await reader.read()  # until the client gives up
    writer.close()


async def _fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 21\r\n\r\nInternal Server Error"
            )
    writer.close()


async def main(page: Path, healthy: int) -> None:
    """Serve until stdin ends."""
    loop = asyncio.get_running_loop()
    recorded, gaps = page.read_bytes(), Gaps()
    servers: list[asyncio.Server] = []
    for place in range(healthy):
        turns, port = Turns(Page(_renamed(recorded, place)), 97 * place), [0]

        def made(turns: Turns = turns, port: list[int] = port) -> Server:
            return Server(turns, lambda: gaps.answered(port[0]))

        servers.append(await loop.create_server(made, "127.0.0.1", 0))
        port[0] = _port(servers[-1])
    odd = {}
    for name, serve in (("dripping", _drip), ("hung", _hang), ("failing", _fail)):
        servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        odd[name] = _port(servers[-1])
    print(json.dumps({"healthy": [_port(server) for server in servers[:healthy]], **odd}), flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(gaps.take()), flush=True)


def _renamed(page: bytes, place: int) -> bytes:
    return page.replace(b'model_name="', b'model_name="m%02d-' % place)


def _port(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
