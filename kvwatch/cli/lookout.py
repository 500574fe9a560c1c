"""What `kvwatch run` watches where no file says it: servers that answer now, and those that come later."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwatch.daemon.newcomers import merged
from kvwatch.model.settings import ServerSettings

if TYPE_CHECKING:
    from kvwatch.sources import discovery

log = logging.getLogger("kvwatch")

# A process that nothing but its use of a GPU makes a candidate is some other program's: it is asked less and
# less often.
FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 600.0
# A look asks no more after this long. Hundreds of processes that accept and never answer would take minutes,
# and a start and a reload wait for theirs; who was not asked has the first turn at the next look.
LOOK_S = 60.0
START_S = 5.0
FORGET_S = 2 * LONGEST_PAUSE_S


@dataclass(slots=True)
class _Asked:
    """When a process was asked last, and how long it is left alone then (only strangers are)."""

    at_s: float
    pause_s: float = 0.0


class Lookout:
    """Remembers who was asked. `active` is False while a file says what to watch."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.active = False
        self._now = now
        self._looking = threading.Lock()  # a reload looks in a thread of its own: nobody is asked twice
        self._starts = 0  # a look that is under way ends when this grows
        self._asked: dict[tuple[int, int], _Asked] = {}  # by pid and first port

    def start(self) -> list[ServerSettings]:
        """Those that answer now, as a start or a reload without a file wants them."""
        self._starts += 1
        with self._looking:
            self._asked = {}
            found = merged((), self._look((), (), START_S), ())
        self.active = True
        for server in found:
            log.info("no configuration file: found %s at %s", server.kind, server.url)
        return list(found)

    def look(self, answering: Collection[str], users: Collection[int]) -> list[ServerSettings]:
        """Servers that answer, except at the URLs in `answering`; `users` are the driver's pids of GPU
        users, of no use in another pid namespace. They are `discovered`: their absence alarms nobody."""
        if not self.active:
            return []
        with self._looking:
            return self._look(answering, users, LOOK_S)

    def _look(
        self, answering: Collection[str], users: Collection[int], longest_s: float
    ) -> list[ServerSettings]:
        from kvwatch.cli import probe  # not where a file says what to watch
        from kvwatch.sources.gpu.procfs import in_host_pid_namespace

        begun_s, starts = self._now(), self._starts
        self._forget(begun_s)
        mine = users if users and in_host_pid_namespace() else ()

        def wanted(candidate: discovery.Candidate) -> bool:
            now_s = self._now()
            over = now_s - begun_s >= longest_s or starts != self._starts
            known = any(candidate.url_at(port) in answering for port in candidate.ports)
            return not over and not known and self._may_ask(candidate, now_s)

        found = probe.look_at_servers(users=mine, wanted=wanted, turn=self._turn)
        return [one.settings for one in found if one.state is not None]

    def _turn(self, candidate: discovery.Candidate) -> float:
        """Who was asked longest ago is asked first."""
        asked = self._asked.get((candidate.pid, candidate.port))
        return float("-inf") if asked is None else asked.at_s

    def _may_ask(self, candidate: discovery.Candidate, now_s: float) -> bool:
        """Whether one may be asked (again); a stranger's pause doubles each time."""
        from kvwatch.sources import discovery

        key = (candidate.pid, candidate.port)
        asked = self._asked.get(key)
        if candidate.kind != discovery.UNKNOWN:
            self._asked[key] = _Asked(now_s)
            return True
        if asked is not None and now_s < asked.at_s + asked.pause_s:
            return False
        pause_s = FIRST_PAUSE_S if asked is None else min(2 * asked.pause_s, LONGEST_PAUSE_S)
        self._asked[key] = _Asked(now_s, pause_s)
        return True

    def _forget(self, now_s: float) -> None:
        """Processes come and go for months."""
        self._asked = {key: one for key, one in self._asked.items() if now_s - one.at_s < FORGET_S}
