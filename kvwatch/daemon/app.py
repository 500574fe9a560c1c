"""Wiring: settings and sources in, the pure core in the middle, exporters out, and the loop around it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvwatch import __version__, core, wire
from kvwatch.actions.base import Context
from kvwatch.daemon import maintenance
from kvwatch.daemon.agents import Agents
from kvwatch.daemon.board import Board
from kvwatch.daemon.clock import RealClock
from kvwatch.daemon.dispatcher import Dispatcher
from kvwatch.daemon.evidence import Evidence
from kvwatch.daemon.giveback import give_back_all, restore_request
from kvwatch.daemon.lifecycle import Lifecycle
from kvwatch.daemon.newcomers import Finder, Newcomers
from kvwatch.daemon.notify import Notifier
from kvwatch.daemon.outstanding import Outstanding
from kvwatch.daemon.paths import Paths
from kvwatch.daemon.shelf import Shelf
from kvwatch.daemon.watchlist import GpuFactory, Watchlist
from kvwatch.exporters import process
from kvwatch.exporters.events import EventLog
from kvwatch.model.action import ActionRequest, EventKind
from kvwatch.model.level import Level
from kvwatch.model.report import Event, ShellStatus, TickReport
from kvwatch.model.settings import Settings

log = logging.getLogger("kvwatch")

# A new sample wakes the loop, but two ticks are at least this far apart (docs/adr/0002).
MIN_SPACING_S = 0.02
# ... and further where a tick is dear (many servers), up to one `tick`: deciding takes about 1/50 of a core.
SPACING_PER_TICK = 50
# Where ticks are much further apart, this is waited for the rest of a group of polls that is coming in.
GATHER_FROM_S = 0.1
GATHER_S = 0.05
# Where nothing has changed, time alone moves only timers of seconds: one tick a second is enough.
IDLE_TICK_S = 1.0
HOUSEKEEPING_S = 0.5
# A tick is late when it starts this many periods after its time (the rule of metrics-server's liveness).
LATE_PERIODS = 1.5
# A core that fails this often in a row is given to systemd to restart.
MAX_CORE_FAILURES = 3
RELOAD_WAIT_S = 5.0
SOURCES_END_S = 3.0
ORPHAN_RETRY_S = 30.0
ORPHAN_DEADLINE_S = 3.0

Loader = Callable[[], Settings]


class ReloadError(Exception):
    """The new configuration is not good; `findings` are ready to print."""

    def __init__(self, findings: list[str]) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


@dataclass(slots=True)
class _Pending:
    """A reload on its way to the loop: new settings, or what was wrong with them."""

    settings: Settings | None
    patterns: Mapping[str, tuple[str, ...]]
    findings: list[str]
    taken: threading.Event


class App:
    """One daemon: everything but argument parsing, signals' installation and process exit.

    The loop runs in the caller's thread (`run`). `report`, `events`, `healthy`, `ready` and
    `reload` may be called from any thread.
    """

    def __init__(
        self,
        settings: Settings,
        paths: Paths,
        *,
        load: Loader,
        finder: Finder,
        gpu_factory: GpuFactory,
        lifecycle: Lifecycle,
        demo: str = "",
        on_events: Callable[[tuple[Event, ...]], None],
    ) -> None:
        self._settings = settings
        self._paths = paths
        self._load = load
        self._lifecycle = lifecycle
        self._on_events = on_events
        self._clock = RealClock()
        self._board = Board()
        self._watchlist = Watchlist(self._board, self._clock, gpu_factory)
        self._agents = Agents(self._board, self._clock, paths.runtime / "agent.sock")
        self._newcomers = Newcomers(finder, self._clock.mono_s())
        self._outstanding = Outstanding(paths.outstanding)
        self._context = Context(limits_dir=paths.limits, boot_id=wire.boot_id())
        self._dispatcher = Dispatcher(self._context, self._outstanding, still_wanted=self._still_wanted)
        self._orphans_tried_s = 0.0
        self._notifier = Notifier()
        self._event_log = EventLog()
        self._pending: _Pending | None = None
        self._to_answer: threading.Event | None = None
        self._reload_lock = threading.Lock()  # one reload at a time
        self._published: TickReport | None = None
        self._last_tick_s = self._clock.mono_s()
        self._spacing_s = MIN_SPACING_S
        self._seen: tuple[int, ShellStatus] | None = None
        self._stepped_s = -IDLE_TICK_S
        self._housekept_s = -HOUSEKEEPING_S
        self._core_failures = 0
        now = self._clock.wall_s()
        self._evidence_failed = False
        self._evidence = Evidence(paths.evidence, self._event_log.since, mono_s=self._last_tick_s, wall_s=now)
        self._shell = ShellStatus(started_wall_s=now, config_last_reload_success_wall_s=now, demo=demo)
        self._state = self._fresh_state()

    # What the web server asks (kvwatch.exporters.provider.Provider)

    def report(self) -> TickReport | None:
        """The last published report."""
        return self._published

    def events(self, since_wall_s: float) -> list[Event]:
        """Audit events since a Unix time, as far as they are kept."""
        return self._event_log.since(since_wall_s)

    def evidence(self) -> Shelf:
        """What was kept of the moments when a paging rule turned red."""
        return self._evidence.shelf

    def healthy(self) -> bool:
        """Whether the last tick started recently enough; says nothing about any source."""
        limit_s = max(2.0, LATE_PERIODS * self._settings.tick_s)
        return self._clock.mono_s() - self._last_tick_s < limit_s

    def ready(self) -> tuple[bool, list[str]]:
        """Whether every configured source has answered well since start, and which have not."""
        report = self._published
        if report is None:
            return False, ["no tick yet"]
        missing = [status.source for status in report.sources if status.good_total == 0]
        return not missing, missing

    def reload(self) -> list[str]:
        """Load and check the configuration, and apply it in the loop; the findings when it is bad."""
        with self._reload_lock:
            pending = self._loaded()
            self._pending = pending
            self._board.changed.set()
            if not pending.taken.wait(RELOAD_WAIT_S) and not pending.findings:
                return ["the loop did not take the new configuration in time"]
            return pending.findings

    def _loaded(self) -> _Pending:
        """Everything of a reload that touches the disk, adapters of new kinds included."""
        try:
            settings = self._load()
            return _Pending(settings, process_patterns(settings), [], threading.Event())
        except ReloadError as error:
            findings = error.findings
        except (OSError, ImportError) as error:
            findings = [f"{error}; mend that and reload"]
        return _Pending(None, {}, findings, threading.Event())

    # The loop

    def run(self) -> int:
        """Tick until asked to stop; the exit status."""
        for problem in give_back_all(self._context, self._outstanding, longest_s=ORPHAN_DEADLINE_S):
            log.error("left by an earlier run: %s", problem)
        self._orphans_tried_s = self._clock.mono_s()
        self._follow_maintenance()  # before anything opens a GPU
        self._watchlist.apply(self._settings)
        self._agents.apply(self._settings)
        self._lifecycle.wake = self._board.changed
        next_tick_s = self._clock.mono_s()
        announced = False
        while not self._lifecycle.stopping:
            now_s = self._wait(next_tick_s)
            self._count_missed(next_tick_s, now_s)
            if not self._tick(now_s):
                return 1
            if self._to_answer is not None:  # not before the report shows what the reload has done
                self._to_answer.set()
                self._to_answer = None
            self._notifier.beat(now_s)
            if not announced:
                self._notifier.ready(self._status_line())
                announced = True
            next_tick_s = now_s + self._period_s()
        return 0

    def close(self) -> None:
        """Stop sources and actions; what hangs is left behind, so that the process can end."""
        self._notifier.send("STOPPING=1")
        self._watchlist.stop()
        self._agents.close()
        self._dispatcher.close()
        self._evidence.close(self._published)
        if not self._watchlist.wait(SOURCES_END_S):
            log.warning("a GPU source did not end in time: its worker ends when its driver call returns")

    def _wait(self, next_tick_s: float) -> float:
        """Sleep until the next tick or a new sample, whichever is first, but never under the spacing."""
        now_s = self._clock.mono_s()
        if next_tick_s > now_s:
            self._board.changed.wait(next_tick_s - now_s)
        early_s = self._last_tick_s + self._spacing_s - self._clock.mono_s()
        if self._spacing_s >= GATHER_FROM_S:
            early_s = max(early_s, GATHER_S)
        if early_s > 0:
            threading.Event().wait(early_s)
        self._board.changed.clear()
        return self._clock.mono_s()

    def _period_s(self) -> float:
        """The longest wait for news: a tick while a limit is out, else what timers of seconds need."""
        return self._settings.tick_s if self._limits_out() else max(self._settings.tick_s, IDLE_TICK_S)

    def _limits_out(self) -> bool:
        report = self._published
        return report is None or any(found.wanted or found.active for found in report.limits)

    def _count_missed(self, due_s: float, now_s: float) -> None:
        period_s = self._settings.tick_s
        late_s = now_s - due_s
        if late_s > LATE_PERIODS * period_s:
            missed = self._shell.ticks_missed_total + int(late_s / period_s)
            self._shell = replace(self._shell, ticks_missed_total=missed)

    def _tick(self, now_s: float) -> bool:
        """One whole tick; False when the core is beyond help."""
        self._last_tick_s = now_s
        self._housekeep(now_s)
        if not self._has_news(now_s):
            return True
        snapshot = self._board.snapshot(now_s, self._shell)
        try:
            self._state, report = core.step(
                self._state, snapshot, self._dispatcher.finished(), self._clock.read()
            )
        except Exception:
            log.exception("bug in the core; its history is dropped")
            return self._begin_again()
        self._core_failures = 0
        took_s = self._clock.mono_s() - now_s
        self._spacing_s = min(max(MIN_SPACING_S, SPACING_PER_TICK * took_s), self._settings.tick_s)
        process.sample()
        self._published = report  # before the requests go out: a lane re-reads it just before acting
        for request in report.due:
            if not self._dispatcher.offer(request):
                dropped = self._shell.dropped_actions_total + 1
                self._shell = replace(self._shell, dropped_actions_total=dropped)
        self._tell(report.events)
        self._remember(report)
        return True

    def _remember(self, report: TickReport) -> None:
        """Evidence is for later: a bug in keeping it must not end the watch."""
        if self._evidence_failed:
            return
        try:
            self._evidence.follow(report)
        except Exception:
            self._evidence_failed = True
            log.exception("bug in keeping evidence; none is kept until the next start")

    def _tell(self, events: tuple[Event, ...]) -> None:
        if events:
            self._event_log.add(events)
            self._on_events(events)

    def _has_news(self, now_s: float) -> bool:
        """Whether this tick can find anything: a new sample, a result, a limit in force, or a second gone."""
        seen = (self._board.version, self._shell)
        idle = (
            seen == self._seen
            and now_s - self._stepped_s < IDLE_TICK_S
            and not self._dispatcher.has_results
            and not self._limits_out()
        )
        if idle:
            return False
        self._seen, self._stepped_s = seen, now_s
        return True

    def _begin_again(self) -> bool:
        """Start the core from nothing; False when that has not helped."""
        self._core_failures += 1
        self._state = self._fresh_state()
        return self._core_failures < MAX_CORE_FAILURES

    def _fresh_state(self) -> core.CoreState:
        return core.initial(self._settings, version=__version__, patterns=process_patterns(self._settings))

    def _still_wanted(self, request: ActionRequest) -> bool:
        """Whether the last report still asks for this limit or still shows this level."""
        report = self._published
        if report is None or request.event is EventKind.RESTORE:
            return True
        if request.limit is not None:
            return any(
                found.server == request.limit.server and found.wanted == request.limit
                for found in report.limits
            )
        return any(
            found.rule is request.rule and found.scope == request.scope and found.level is request.level
            for found in report.verdicts
        )

    # Now and then

    def _housekeep(self, now_s: float) -> None:
        if self._lifecycle.reload_requested and not self._reload_lock.locked():
            self._lifecycle.reload_requested = False
            threading.Thread(target=self._reload_by_signal, name="reload", daemon=True).start()
        pending, self._pending = self._pending, None
        if pending is not None:
            self._take(pending)
            self._to_answer = pending.taken
        if now_s - self._housekept_s >= HOUSEKEEPING_S:
            self._housekept_s = now_s
            self._follow_maintenance()
            self._watchlist.retry()
            self._meet_newcomers(now_s)
            self._retry_orphans(now_s)
            self._count_datagrams()
            self._tell_evidence()

    def _count_datagrams(self) -> None:
        totals, error = self._agents.totals(), self._agents.error
        if (totals, error) != (self._shell.agent_datagrams_total, self._shell.agents_error):
            self._shell = replace(self._shell, agent_datagrams_total=totals, agents_error=error)

    def _tell_evidence(self) -> None:
        for event in self._evidence.news(self._clock.wall_s()):
            self._state, event = core.numbered(self._state, event)
            self._tell((event,))
        tally = self._evidence.shelf.tally()
        totals = (
            ("written", tally.written_total),
            ("failed", tally.failed_total),
            ("dropped", tally.dropped_total),
        )
        if totals != self._shell.evidence_total:
            self._shell = replace(self._shell, evidence_total=totals)

    def _retry_orphans(self, now_s: float) -> None:
        """Levers that an earlier run moved and that did not give back at start, while nothing is wanted."""
        if now_s - self._orphans_tried_s < ORPHAN_RETRY_S or self._published is None:
            return
        self._orphans_tried_s = now_s
        in_use = {found.server for found in self._published.limits if found.wanted or found.outstanding}
        for entry in self._outstanding.entries():
            if entry.server not in in_use:
                self._dispatcher.offer(restore_request(entry, ORPHAN_DEADLINE_S))

    def _reload_by_signal(self) -> None:
        """SIGHUP: reading the file, or looking for servers where there is none, must not stop the loop."""
        self._notifier.reloading()
        self.reload()
        self._notifier.ready(self._status_line())

    def _take(self, pending: _Pending) -> None:
        if pending.settings is not None:
            self._apply(pending.settings, pending.patterns)
            return
        for finding in pending.findings:
            log.error("configuration not loaded: %s", finding)
        error = "; ".join(pending.findings)[:1000]
        self._shell = replace(self._shell, config_last_reload_successful=False, config_error=error)

    def _apply(self, settings: Settings, patterns: Mapping[str, tuple[str, ...]]) -> None:
        if settings.web != self._settings.web:
            log.warning("web settings change with the next restart only")
        servers = self._newcomers.reloaded(self._settings.servers, settings.servers)
        if servers != settings.servers:
            settings = replace(settings, servers=servers)
            patterns = process_patterns(settings)
        self._adopt(settings, patterns)
        self._shell = replace(
            self._shell,
            config_last_reload_successful=True,
            config_last_reload_success_wall_s=self._clock.wall_s(),
            config_error="",
        )
        log.info("configuration loaded")

    def _adopt(self, settings: Settings, patterns: Mapping[str, tuple[str, ...]]) -> None:
        self._settings = settings
        self._watchlist.apply(settings)
        self._agents.apply(settings)
        self._state = core.reconfigure(self._state, settings, patterns=patterns)

    def _meet_newcomers(self, now_s: float) -> None:
        """Watch servers that have come since; only where no file says what to watch is there any."""
        if self._published is None:
            return
        servers = self._newcomers.follow(self._published, self._settings.servers, now_s)
        if servers != self._settings.servers:
            settings = replace(self._settings, servers=servers)
            self._adopt(settings, process_patterns(settings))

    def _follow_maintenance(self) -> None:
        """Release or take back the GPUs as the maintenance file says."""
        state = maintenance.read(self._paths.maintenance)
        until = None if state is None else state.until_wall_s
        if (until is None) != (self._shell.maintenance_until_wall_s is None):
            self._watchlist.release_gpus(until is not None)
        if until != self._shell.maintenance_until_wall_s:
            self._shell = replace(self._shell, maintenance_until_wall_s=until)

    def _status_line(self) -> str:
        report = self._published
        level = Level.UNKNOWN if report is None else report.headline
        return f"{level.name.lower()}: {len(self._settings.servers)} server(s)"


def process_patterns(settings: Settings) -> Mapping[str, tuple[str, ...]]:
    """For each kind in use, the patterns that recognise its processes."""
    from kvwatch.sources.servers import registry

    kinds = {server.kind for server in settings.servers}
    known = registry.kinds()
    wanted = known if "auto" in kinds else tuple(kind for kind in known if kind in kinds)
    return {kind: registry.process_patterns(kind) for kind in wanted}
