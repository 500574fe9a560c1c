"""Where does a process listen? Its TCP sockets, its network namespace, ports that Docker publishes for it.

All of it comes from /proc; what may not be read there is None, never "nothing".
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
MAX_DESCRIPTORS = 65536
_PROXY = re.compile(
    r"\bdocker-proxy\b.*-host-ip (\S+) -host-port (\d+) -container-ip (\S+) -container-port (\d+)"
)
_LOCAL_ADDRESS = re.compile(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s*/32 host LOCAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One listening TCP socket."""

    address: str
    port: int

    @property
    def host(self) -> str | None:
        """The loopback host under which it answers, None where it answers on another address only."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None) or address
        if mapped.is_unspecified or (mapped.is_loopback and mapped.version == 4):
            return "127.0.0.1"
        return f"[{mapped}]" if mapped.is_loopback else None


class Sockets:
    """Listening sockets by process; tables are read once per network namespace."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._own = self._namespace("self")
        self._handed_out = _handed_out(proc)
        self._tables: dict[str, dict[str, Listener]] = {}

    def of(self, pid: int) -> tuple[Listener, ...] | None:
        """What a process listens on, by port; None where its descriptors may not be read.

        Ports that the kernel hands out are left out: what listens there was never meant to be found by
        its port, speaks no HTTP (NCCL, Gloo, ZeroMQ), and is best left alone.
        """
        namespace = self._namespace(str(pid))
        if namespace is None:
            return None
        table = self._tables.get(namespace)
        if table is None:
            table = self._table(pid)
            if table is None:  # it has ended meanwhile: the next one of this namespace is asked
                return None
            self._tables[namespace] = table
        try:
            inodes = self._inodes(pid)
        except OSError:
            return None
        here = [table[inode] for inode in inodes & table.keys() if table[inode].port not in self._handed_out]
        return tuple(sorted(here, key=lambda one: one.port))

    def elsewhere(self, pid: int) -> bool:
        """Whether a process is known to live in another network namespace than ours."""
        namespace = self._namespace(str(pid))
        return namespace is not None and self._own is not None and namespace != self._own

    def addresses(self, pid: int) -> frozenset[str]:
        """IPv4 addresses of a process's network namespace."""
        try:
            text = (self._proc / str(pid) / "net/fib_trie").read_text()
        except OSError:
            return frozenset()
        return frozenset(_LOCAL_ADDRESS.findall(text))

    def _namespace(self, pid: str) -> str | None:
        try:
            return str((self._proc / pid / "ns/net").readlink())
        except OSError:
            return None

    def _inodes(self, pid: int) -> frozenset[str]:
        found = set()
        for number, entry in enumerate((self._proc / str(pid) / "fd").iterdir()):
            if number >= MAX_DESCRIPTORS:
                break
            try:
                target = str(entry.readlink())
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                found.add(target[8:-1])
        return frozenset(found)

    def _table(self, pid: int) -> dict[str, Listener] | None:
        """Listening sockets of a namespace by inode; None where neither table can be read."""
        found = {}
        readable = False
        for name in ("tcp", "tcp6"):
            try:
                lines = (self._proc / str(pid) / "net" / name).read_text().splitlines()[1:]
            except OSError:
                continue
            readable = True
            for line in lines:
                fields = line.split()
                if len(fields) > 9 and fields[3] == LISTEN:
                    found[fields[9]] = _listener(fields[1])
        return found if readable else None


def _handed_out(proc: Path) -> range:
    try:
        low, high = (proc / "sys/net/ipv4/ip_local_port_range").read_text().split()
        return range(int(low), int(high) + 1)
    except (OSError, ValueError):
        return range(32768, 61000)  # the kernel's default


def _listener(text: str) -> Listener:
    """`0100007F:1F40`: the address as 32-bit words in the host's order, the port."""
    address, _, port = text.partition(":")
    words = bytes.fromhex(address)
    raw = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return Listener(address=str(ipaddress.ip_address(raw)), port=int(port, 16))


def published(commands: Iterable[str]) -> Mapping[tuple[str, int], int]:
    """Host ports by (container address, container port), from docker-proxy's command lines."""
    ports = {}
    for command in commands:
        found = _PROXY.search(command)
        if found and is_port(inside := int(found[4])) and is_port(outside := int(found[2])):
            ports[found[3], inside] = outside
    return ports


def is_port(number: int) -> bool:
    """Whether this can be a port: what a command line says need not be one."""
    return 0 < number < 65536
