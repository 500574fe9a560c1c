"""kvwatch beside a server, both pages of the same instant."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from checks.engines.load import Load
from checks.engines.recorder import Recorder
from checks.engines.server import Server
from tests.harness import Daemon, Page

S = TypeVar("S", bound=Server)
Same = Callable[[Page, Mapping[str, str]], None]
QUIET_DEADLINE_S = 30
CONFIG = """
gpus: {{source: none}}
servers:
  - {{name: chat, kind: {kind}, url: "{url}", period: 1s, timeout: 900ms{more}}}
{rest}"""


class Watched(Generic[S]):
    """A server, a recorder in front of it, and kvwatch reading through the recorder.

    `same` is given kvwatch's page and the server's answers by path; it asserts. `paths` are those that one
    reading asks for; `known` is a metric that the page has once a reading was in time.
    """

    def __init__(
        self,
        folder: Path,
        server: S,
        *,
        kind: str,
        same: Same,
        paths: tuple[str, ...] = ("/metrics",),
        known: str = "kvwatch_server_up",
        more: str = "",
        rest: str = "",
    ) -> None:
        self.folder, self.server = folder, server
        self._same, self._paths, self._known = same, paths, known
        server.wait()
        self.recorder = Recorder(server.base, folder / "pages")
        text = CONFIG.format(
            kind=kind,
            url=self.recorder.url,
            more=f", {more}" if more else "",
            rest=rest.format(url=server.base),
        )
        self.daemon = Daemon(folder / "kvwatch", text).start()
        self.daemon.until(self._first_report, 10, "a first report")
        self._loads: list[Load] = []

    def _first_report(self) -> bool:
        try:
            self.daemon.get("/api/v1/state")
        except urllib.error.HTTPError as error:
            error.close()
            return False
        return True

    def load(self, **kinds: Any) -> Load:
        """A load on the server, not started yet, that ends with it at the latest."""
        self._loads.append(Load(self.server.base, **kinds))
        return self._loads[-1]

    def compare(self) -> Page:
        """Read kvwatch's page when it stands on the server's last answers, and compare."""
        end_s = time.monotonic() + QUIET_DEADLINE_S
        while time.monotonic() < end_s:
            before = self.recorder.last(*self._paths)
            page = self.daemon.metrics()
            read_at = page.get("kvwatch_source_last_success_timestamp_seconds", source="server/chat")
            known = page.all(self._known, server="chat")  # a late reading leaves nothing to compare
            quiet = known and before and self.recorder.last(*self._paths) == before
            if (
                quiet
                and before
                and read_at is not None
                and read_at > max(one.at_s for one in before.values())
            ):
                self._same(page, {path: one.text for path, one in before.items()})
                return page
            time.sleep(0.05)
        raise AssertionError("no quiet moment between two readings")

    def follow(self, seconds: float) -> list[Page]:
        """Compare for a while, at least five times."""
        end_s = time.monotonic() + seconds
        pages = []
        while time.monotonic() < end_s or len(pages) < 5:
            pages.append(self.compare())
        return pages

    def running(self) -> float:
        """Requests that kvwatch says run, on all engines."""
        return sum(value for _, value in self.daemon.metrics().all("kvwatch_requests", state="running"))

    def start_from_idle(self, load: Load, running: int) -> None:
        """Begin a load and wait until kvwatch has seen so many of it (not the end of the one before)."""
        self.daemon.until(lambda: self.running() == 0, 60, "the server to be idle")
        load.start()
        self.daemon.until(lambda: self.running() >= running, 30, "requests to run")

    def told(self) -> dict[str, Any]:
        """What kvwatch knows of the server beside its metrics."""
        (found,) = [one for one in self.daemon.state()["servers"] if one["server"] == "chat"]
        return dict(found)

    def notes(self) -> list[str]:
        """What kvwatch says of the server in words."""
        return list(self.told()["notes"])

    def limits(self) -> list[int]:
        """The server's own limit of running requests, by engine, as kvwatch read it."""
        return [engine["max_running"] for engine in self.told()["engines"]]

    def close(self) -> None:
        """End them all."""
        try:
            self.daemon.stop()
        finally:
            for load in self._loads:
                load.stop()
            self.server.stop()
            for load in self._loads:
                load.join(20)
            self.recorder.close()


def highest(pages: list[Page], name: str, **labels: str) -> float:
    """The highest value on these pages."""
    return max(value for page in pages for _, value in page.all(name, **labels))
