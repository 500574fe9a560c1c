"""Clients that want to hold a server up: `python -m checks.endurance.attackers PORT KIND=COUNT…`.

Kinds: `idle` says nothing, `drip` sends a byte of a request a second, `header` sends 10 MB of one header,
`hello` sends half a TLS greeting, `handshake` a whole one and then nothing. Whoever is closed comes
back after one to three seconds. Ends when standard input closes; then prints what became of them as JSON.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import resource
import selectors
import socket
import ssl
import sys
import time
from dataclasses import dataclass, field

from checks.endurance.process import die_with_parent

BACK_AFTER_S = (1.0, 3.0)
DRIP_EVERY_S = 1.0
HEADER_BYTES = 10_000_000
MAX_SOCKETS = 1450
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: " + b"a" * 4000
KINDS = ("idle", "drip", "header", "hello", "handshake")


@dataclass(eq=False, slots=True)
class Attacker:
    """One client and where it stands; only its newest entry in the queue (`turn`) counts."""

    kind: str
    sock: socket.socket | None = None
    turn: int = 0
    sent: int = 0


@dataclass
class Crowd:
    """All of them, in one thread."""

    port: int
    closed: dict[str, int] = field(default_factory=dict)
    opened: dict[str, int] = field(default_factory=dict)
    failed: int = 0

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._queue: list[tuple[float, int, Attacker]] = []
        self._number = 0
        self._hello = _client_hello()

    def add(self, kind: str, count: int) -> None:
        """So many more of a kind, at once."""
        for _ in range(count):
            self._later(Attacker(kind), 0.0)

    def run(self) -> None:
        """Until standard input closes."""
        while True:
            wait_s = self._queue[0][0] - time.monotonic() if self._queue else 1.0
            for key, _ in self._selector.select(max(0.0, wait_s)):
                if key.data is None:
                    return
                self._heard(key.data)
            for _ in range(64):  # a few at a time: the closed ones are to be seen as well
                if not self._queue or self._queue[0][0] > time.monotonic():
                    break
                _, turn, one = heapq.heappop(self._queue)
                if turn == one.turn:
                    self._act(one)

    def _later(self, one: Attacker, seconds: float) -> None:
        self._number += 1
        one.turn = self._number
        heapq.heappush(self._queue, (time.monotonic() + seconds, one.turn, one))

    def _act(self, one: Attacker) -> None:
        if one.sock is None and not self._connect(one):
            return
        try:
            self._speak(one)
        except BlockingIOError:
            self._later(one, 0.02)
        except OSError:
            self._lost(one)

    def _connect(self, one: Attacker) -> bool:
        one.sock, one.sent = socket.socket(), 0
        one.sock.setblocking(False)
        code = one.sock.connect_ex(("127.0.0.1", self.port))
        if code not in (0, 115):
            self.failed += 1
            self._lost(one)
            return False
        self.opened[one.kind] = self.opened.get(one.kind, 0) + 1
        self._selector.register(one.sock, selectors.EVENT_READ, one)
        return True

    def _speak(self, one: Attacker) -> None:
        assert one.sock is not None
        if one.kind == "drip":
            one.sent += one.sock.send(REQUEST[one.sent : one.sent + 1])
            self._later(one, DRIP_EVERY_S)
        elif one.kind == "header":
            chunk = REQUEST if one.sent == 0 else b"a" * 65536
            one.sent += one.sock.send(chunk)
            if one.sent < HEADER_BYTES:
                self._later(one, 0.0)
        elif one.kind in ("hello", "handshake") and one.sent == 0:
            whole = one.kind == "handshake"
            one.sent += one.sock.send(self._hello if whole else self._hello[: len(self._hello) // 2])

    def _heard(self, one: Attacker) -> None:
        """An answer is thrown away; the end of the connection is the end of this try."""
        if one.sock is None:
            return
        try:
            if not one.sock.recv(65536):
                self._lost(one)
        except BlockingIOError:
            return
        except OSError:
            self._lost(one)

    def _lost(self, one: Attacker) -> None:
        if one.sock is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(one.sock)
            one.sock.close()
            one.sock = None
            self.closed[one.kind] = self.closed.get(one.kind, 0) + 1
        self._later(one, random.uniform(*BACK_AFTER_S))


def _client_hello() -> bytes:
    """The first message of a real TLS client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def main(argv: list[str]) -> int:
    """Attack until told to stop."""
    die_with_parent()
    os.nice(5)  # the well-behaved client is what is measured
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard > 0 else 4096, hard))
    wanted = {kind: int(count) for kind, _, count in (word.partition("=") for word in argv[1:])}
    if set(wanted) - set(KINDS) or sum(wanted.values()) > MAX_SOCKETS:
        print(f"kinds: {', '.join(KINDS)}; at most {MAX_SOCKETS} together", file=sys.stderr)
        return 2
    crowd = Crowd(int(argv[0]))
    for kind, count in wanted.items():
        crowd.add(kind, count)
    crowd.run()
    print(json.dumps({"opened": crowd.opened, "closed": crowd.closed, "failed": crowd.failed}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
