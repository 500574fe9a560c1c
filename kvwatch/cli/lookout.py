"""What `kvwatch run` watches where no file says it: servers that answer now, and those that come later."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from kvwatch.model.settings import ServerSettings

if TYPE_CHECKING:
    from kvwatch.sources import discovery

log = logging.getLogger("kvwatch")

# A process that nothing but its use of a GPU makes a candidate is some other program's: it is asked less and
# less often.
FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 600.0


class Lookout:
    """Remembers which strangers were asked. `active` is False while a file says what to watch."""

    def __init__(self) -> None:
        self.active = False
        self._asked: dict[tuple[int, int], tuple[float, float]] = {}  # (pid, port): not before, pause after

    def start(self) -> list[ServerSettings]:
        """Those that answer now, as a start or a reload without a file wants them."""
        self.active = True
        self._asked = {}
        servers = self.look((), ())
        for server in servers:
            log.info("no configuration file: found %s at %s", server.kind, server.url)
        return servers

    def look(self, answering: Collection[str], users: Collection[int]) -> list[ServerSettings]:
        """Servers that answer, except at the URLs in `answering`; `users` are the driver's pids of GPU
        users, of no use in another pid namespace. They are `discovered`: their absence alarms nobody."""
        if not self.active:
            return []
        from kvwatch.cli import probe  # not where a file says what to watch
        from kvwatch.sources import discovery
        from kvwatch.sources.gpu.procfs import in_host_pid_namespace

        mine = users if users and in_host_pid_namespace() else ()

        def wanted(candidate: discovery.Candidate) -> bool:
            if any(candidate.url_at(port) in answering for port in candidate.ports):
                return False
            return candidate.kind != discovery.UNKNOWN or self._turn(candidate.pid, candidate.port)

        found = probe.look_at_servers(users=mine, wanted=wanted)
        return [one.settings for one in found if one.state is not None]

    def _turn(self, pid: int, port: int) -> bool:
        """Whether a stranger may be asked again; each time the pause doubles."""
        now_s = time.monotonic()
        due_s, pause_s = self._asked.get((pid, port), (now_s, FIRST_PAUSE_S))
        if now_s < due_s:
            return False
        self._asked[pid, port] = (now_s + pause_s, min(2 * pause_s, LONGEST_PAUSE_S))
        return True
