"""Servers that start after kvwatch, where no file names them: looked for beside the loop, now and then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from kvwatch.model.report import TickReport
from kvwatch.model.settings import ServerSettings

log = logging.getLogger("kvwatch.newcomers")

LOOK_EVERY_S = 15.0  # a look reads the command lines of all processes: some 20 ms on a busy host
GONE_S = 3600.0  # a server that was found and has been down this long is forgotten
MAX_FOUND = 64  # as many as the service's limits have room for (systemd/kvwatch.service)


class Finder(Protocol):
    """Looks for servers; `active` only while no file says what to watch."""

    active: bool

    def look(self, answering: Collection[str], users: Collection[int]) -> Sequence[ServerSettings]:
        """Servers that answer elsewhere than at the URLs in `answering`. `users`: pids of GPU users."""
        ...


class Newcomers:
    """One look at a time, in a thread of its own. Called from the loop's thread only."""

    def __init__(self, finder: Finder, now_s: float) -> None:
        self._finder = finder
        self._due_s = now_s + LOOK_EVERY_S
        self._thread: threading.Thread | None = None
        self._found: tuple[ServerSettings, ...] = ()
        self._round = 0
        self._left_out: frozenset[str] = frozenset()

    def follow(
        self, report: TickReport, servers: Sequence[ServerSettings], now_s: float
    ) -> tuple[ServerSettings, ...]:
        """The servers to watch from now on: `servers` itself where nothing came or went."""
        if not self._finder.active or (self._thread is not None and self._thread.is_alive()):
            return tuple(servers)
        found, self._found = self._found, ()
        if now_s >= self._due_s:
            self._due_s = now_s + LOOK_EVERY_S
            self._look(report)
        after = merged(servers, found, _long_gone(report))
        if found:
            self._tell(servers, found, after)
        return after

    def reloaded(
        self, before: Sequence[ServerSettings], after: Sequence[ServerSettings]
    ) -> tuple[ServerSettings, ...]:
        """The servers to watch after a reload to `after`; voids the look that is under way.

        Without a file whoever was found before stays: it may just be too busy to answer.
        """
        self._round += 1
        self._found = ()
        if not self._finder.active:
            return tuple(after)
        return merged([server for server in before if not server.configured], after, ())

    def _tell(
        self,
        before: Sequence[ServerSettings],
        found: Sequence[ServerSettings],
        after: Sequence[ServerSettings],
    ) -> None:
        """Log what is new, and once what has no room."""
        for server in after:
            if server not in before:
                log.info("no configuration file: found %s at %s", server.kind, server.url)
        watched = {server.url for server in after}
        left_out = frozenset(server.url for server in found) - watched
        if left_out - self._left_out:
            log.warning(
                "%d more servers answer, %s for one, and are not watched: %d are already",
                len(left_out),
                min(left_out),
                MAX_FOUND,
            )
        self._left_out = left_out

    def _look(self, report: TickReport) -> None:
        answering = frozenset(server.url for server in report.servers if server.up)
        users, asked_in = frozenset(_gpu_users(report)), self._round

        def run() -> None:
            found = tuple(self._finder.look(answering, users))
            if asked_in == self._round:
                self._found = found

        self._thread = threading.Thread(target=run, name="newcomers", daemon=True)
        self._thread.start()


def merged(
    servers: Sequence[ServerSettings], found: Sequence[ServerSettings], gone: Collection[str]
) -> tuple[ServerSettings, ...]:
    """`servers` without those gone, then what was found; a place that changed its kind is told by the new.

    `gone` are names; what is configured stays. One server per URL: two processes whose command lines name the
    same place are one. Beyond MAX_FOUND nothing is added.
    """
    known = {(server.url, server.kind) for server in servers}
    as_before = {server.url for server in found if (server.url, server.kind) in known}
    news = {server.url: server for server in reversed(found) if server.url not in as_before}
    kept = [
        server for server in servers if server.configured or not (server.name in gone or server.url in news)
    ]
    room = max(0, MAX_FOUND - len(kept))
    return (*kept, *[*reversed(news.values())][:room])


def _long_gone(report: TickReport) -> frozenset[str]:
    return frozenset(
        server.server for server in report.servers if (server.signals.down_for_s or 0.0) > GONE_S
    )


def _gpu_users(report: TickReport) -> Iterator[int]:
    """Pids of GPU users as the driver names them."""
    for gpu in report.gpus:
        whole = gpu.state.ledger_pass
        for process in (whole.processes or ()) if whole is not None else ():
            yield process.pid
