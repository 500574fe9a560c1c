"""How many clients at once, how long for what, and on which socket?"""

from __future__ import annotations

import errno
import resource
import socket
from dataclasses import dataclass

SHORT_OF_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPTS_AT_ONCE = 32  # then those who are connected have their turn
# Connections that wait to be accepted. Who does not fit is heard again after a second: a flood of a thousand
# at once must not cost a scrape that second. The kernel's own bound (net.core.somaxconn) is 4,096.
BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Deadlines in seconds and counts; what passes them is closed."""

    connections: int = 256
    request_s: float = 10.0  # for a whole request, and for a whole TLS handshake
    idle_s: float = 300.0  # between requests; longer than any usual scrape interval
    write_s: float = 15.0  # for the client to take an answer
    linger_s: float = 2.0
    unchecked: int = 64  # passwords that wait to be checked; beyond it the client is told to come back


def connection_cap(wanted: int) -> int:
    """How many clients may be connected: well below what the process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(8, min(wanted, soft // 2))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; an empty host means every address. OSError when it cannot be had."""
    host = host.strip("[]")
    dual = not host and socket.has_dualstack_ipv6()
    found = socket.getaddrinfo(
        "::" if dual else host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
