"""Carries out what the core decided: one lane per target, never in the loop."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvwatch.actions import base
from kvwatch.actions.base import Action, ActionError, Attempt, Context
from kvwatch.daemon.giveback import give_back_all
from kvwatch.daemon.outstanding import Entry, Outstanding
from kvwatch.model.action import ActionRequest, ActionResult, EventKind, Outcome

log = logging.getLogger("kvwatch.dispatcher")

# A lane holds a restore behind a limit and a few notices; more would be stale before their turn.
LANE_LENGTH = 8
# A lane that has had nothing to do for this long ends its thread; the next request starts it again.
LANE_IDLE_S = 60.0
# At stop, limits under way are broken off and levers given back within this time each; what is left is
# for `kvwatch restore`. Notices under way get the same time to finish.
STOP_DEADLINE_S = 3.0
MAX_ACTIONS = 256


class _Lane:
    """One target's queue and its thread: one request at a time, in the order they came."""

    def __init__(self, name: str, work: Callable[[ActionRequest], None], idle_s: float) -> None:
        self._name = name
        self._work = work
        self._idle_s = idle_s
        self._lock = threading.Lock()  # protects the thread's end against an offer at the same moment
        self._queue: queue.Queue[ActionRequest | None] = queue.Queue(maxsize=LANE_LENGTH)
        self._thread: threading.Thread | None = None
        self._stopped = False

    def offer(self, request: ActionRequest) -> bool:
        """Queue one; False when full."""
        with self._lock:
            try:
                self._queue.put_nowait(request)
            except queue.Full:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"act-{self._name}", daemon=True)
                self._thread.start()
        return True

    def stop(self) -> None:
        """End the thread as soon as it has nothing to do."""
        self._stopped = True
        try:
            self._queue.put_nowait(None)  # wakes it; a full queue needs no waking
        except queue.Full:
            return

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; False when it takes longer."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, timeout_s))
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while True:
            request = self._next()
            if request is not None:
                self._work(request)
                continue
            with self._lock:
                if self._queue.empty():
                    self._thread = None
                    return

    def _next(self) -> ActionRequest | None:
        try:
            return self._queue.get(timeout=0.0 if self._stopped else self._idle_s)
        except queue.Empty:
            return None


class Dispatcher:
    """Takes requests without waiting and hands back what became of them.

    `still_wanted` is asked just before acting: what has recovered meanwhile is skipped.
    """

    def __init__(
        self,
        context: Context,
        outstanding: Outstanding,
        *,
        still_wanted: Callable[[ActionRequest], bool],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        lane_idle_s: float = LANE_IDLE_S,
    ) -> None:
        self._context = context
        self._outstanding = outstanding
        self._still_wanted = still_wanted
        self._monotonic = monotonic
        self._wall = wall
        self._lane_idle_s = lane_idle_s
        self._lanes: dict[str, _Lane] = {}
        self._actions: dict[str, Action] = {}
        self._finished: deque[ActionResult] = deque(maxlen=1000)
        self._last_bug = ""

    def offer(self, request: ActionRequest) -> bool:
        """Queue one request on its target's lane; False when the lane is full. Never waits."""
        lane = self._lanes.get(request.target)
        if lane is None:
            lane = self._lanes[request.target] = _Lane(request.target, self._carry_out, self._lane_idle_s)
        if not self._context.stopping.is_set() and lane.offer(request):
            return True
        attempt = Attempt(outcome=Outcome.FAILED, detail="dropped: the lane is full, or kvwatch stops")
        self._finish(request, self._monotonic(), attempt)
        return False

    @property
    def has_results(self) -> bool:
        """Whether `finished` would hand anything back."""
        return bool(self._finished)

    def finished(self) -> tuple[ActionResult, ...]:
        """Results since the last call."""
        found = []
        while self._finished:
            found.append(self._finished.popleft())
        return tuple(found)

    def close(self) -> None:
        """Break off limits under way, then give back everything that is out, and all leases.

        Nothing is imposed from here on: what is queued is skipped, and a lane that moves a lever
        holds its lock, for which the giving back waits.
        """
        self._context.stopping.set()
        for lane in self._lanes.values():
            lane.stop()
        acting = [lane for target, lane in self._lanes.items() if target.startswith("limit/")]
        _join(acting, STOP_DEADLINE_S)
        for problem in give_back_all(self._context, self._outstanding, longest_s=STOP_DEADLINE_S):
            log.error("limit not given back at stop: %s", problem)
        _join(self._lanes.values(), STOP_DEADLINE_S)

    def _carry_out(self, request: ActionRequest) -> None:
        started_s = self._monotonic()
        self._finish(request, started_s, self._attempt(request))

    def _attempt(self, request: ActionRequest) -> Attempt:
        """Carry out one request; every failure becomes an outcome."""
        if request.dry_run:
            return Attempt(outcome=Outcome.DRY_RUN)
        try:
            if not self._wanted(request):
                return Attempt(outcome=Outcome.SKIPPED_RECOVERED)
            return self._perform(request)
        except ActionError as error:
            return Attempt(outcome=error.outcome, detail=str(error))
        except Exception as error:
            if repr(error) != self._last_bug:
                log.exception("bug in an action", extra={"action": request.action})
            self._last_bug = repr(error)
            return Attempt(outcome=Outcome.FAILED, detail=f"bug in this action: {error!r}")

    def _wanted(self, request: ActionRequest) -> bool:
        """After the stop has begun no limit is imposed any more."""
        if request.event is EventKind.LIMIT and self._context.stopping.is_set():
            return False
        return self._still_wanted(request)

    def _perform(self, request: ActionRequest) -> Attempt:
        action = self._action(request)
        if request.limit is None or action.self_expiring:
            return action.perform(request)
        entry = Entry(
            server=request.limit.server,
            action=request.action,
            params=request.params,
            since_wall_s=self._wall(),
        )
        with self._outstanding.lever(entry, request.deadline_s) as (held, had):
            if request.event is EventKind.RESTORE:
                attempt = action.perform(request, held)
                if had:
                    self._outstanding.remove(entry)
                return attempt
            return self._impose(action, request, entry, held, had=had)

    def _impose(
        self, action: Action, request: ActionRequest, entry: Entry, held: int | None, *, had: bool
    ) -> Attempt:
        """Move a lever that has no end of its own: noted on disk first, and nobody else at it."""
        if not had:
            raise ActionError(
                Outcome.REFUSED, "another program of ours is still at this lever (or its lock cannot be had)"
            )
        if not self._wanted(request):
            return Attempt(outcome=Outcome.SKIPPED_RECOVERED)
        try:
            self._outstanding.add(entry)
        except OSError as error:
            raise ActionError(
                Outcome.REFUSED,
                f"the limit could not be noted for giving back ({error.strerror}), so it was not imposed",
            ) from error
        return action.perform(request, held)

    def _action(self, request: ActionRequest) -> Action:
        key = f"{request.action} {json.dumps(request.params, sort_keys=True, default=list)}"
        action = self._actions.get(key)
        if action is None:
            if len(self._actions) >= MAX_ACTIONS:  # only after very many reloads
                self._actions.clear()
            action = self._actions[key] = base.create(request.action, request.params, self._context)
        return action

    def _finish(self, request: ActionRequest, started_s: float, attempt: Attempt) -> None:
        known = request.action in base.kinds()
        self._finished.append(
            ActionResult(
                request_id=request.request_id,
                target=request.target,
                action=request.action,
                event=request.event,
                outcome=attempt.outcome,
                started_s=started_s,
                took_s=self._monotonic() - started_s,
                finished_wall_s=self._wall(),
                detail=attempt.detail,
                limit=request.limit,
                read_back=attempt.read_back,
                self_expiring=known and base.is_self_expiring(request.action),
                step=request.step,
            )
        )


def _join(lanes: Iterable[_Lane], within_s: float) -> None:
    end_s = time.monotonic() + within_s
    for lane in lanes:
        lane.join(end_s - time.monotonic())
