"""Carries out what the core decided: one lane per target, never in the loop."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from kvwatch.actions import base
from kvwatch.actions.base import Action, ActionError, Attempt, Context
from kvwatch.daemon.outstanding import Entry, Outstanding
from kvwatch.model.action import ActionRequest, ActionResult, EventKind, Limit, Outcome

log = logging.getLogger("kvwatch.dispatcher")

# A lane holds a restore behind a limit and a few notices; more would be stale before their turn.
LANE_LENGTH = 8
# At stop every lever is given back within this time; what is left is for `kvwatch restore`.
STOP_DEADLINE_S = 3.0


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
    ) -> None:
        self._context = context
        self._outstanding = outstanding
        self._still_wanted = still_wanted
        self._monotonic = monotonic
        self._wall = wall
        self._lanes: dict[str, queue.Queue[ActionRequest | None]] = {}
        self._actions: dict[str, Action] = {}
        self._finished: deque[ActionResult] = deque(maxlen=1000)
        self._last_bug = ""

    def offer(self, request: ActionRequest) -> bool:
        """Queue one request on its target's lane; False when the lane is full. Never waits."""
        lane = self._lanes.get(request.target)
        if lane is None:
            lane = self._lanes[request.target] = queue.Queue(maxsize=LANE_LENGTH)
            threading.Thread(
                target=self._work, args=(lane,), name=f"act-{request.target}", daemon=True
            ).start()
        try:
            lane.put_nowait(request)
        except queue.Full:
            self._finish(
                request, self._monotonic(), Attempt(outcome=Outcome.FAILED, detail="lane full: dropped")
            )
            return False
        return True

    def finished(self) -> tuple[ActionResult, ...]:
        """Results since the last call."""
        found = []
        while self._finished:
            found.append(self._finished.popleft())
        return tuple(found)

    def close(self) -> None:
        """Give back everything that does not end by itself, within the stop deadline, and all leases."""
        for lane in self._lanes.values():
            try:
                lane.put_nowait(None)
            except queue.Full:
                continue
        give_back_all(self._context, self._outstanding, STOP_DEADLINE_S)

    def _work(self, lane: queue.Queue[ActionRequest | None]) -> None:
        while (request := lane.get()) is not None:
            started_s = self._monotonic()
            self._finish(request, started_s, self._attempt(request))

    def _attempt(self, request: ActionRequest) -> Attempt:
        """Carry out one request; every failure becomes an outcome."""
        if request.dry_run:
            return Attempt(outcome=Outcome.DRY_RUN)
        if not self._still_wanted(request):
            return Attempt(outcome=Outcome.SKIPPED_RECOVERED)
        try:
            return self._perform(request)
        except ActionError as error:
            return Attempt(outcome=error.outcome, detail=str(error))
        except Exception as error:
            if repr(error) != self._last_bug:
                log.exception("bug in an action", extra={"action": request.action})
            self._last_bug = repr(error)
            return Attempt(outcome=Outcome.FAILED, detail=f"bug in this action: {error!r}")

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
        if request.event is EventKind.RESTORE:
            attempt = action.perform(request)
            self._outstanding.remove(entry)
            return attempt
        try:
            self._outstanding.add(entry)
        except OSError as error:
            raise ActionError(
                Outcome.REFUSED,
                f"the limit could not be noted for giving back ({error.strerror}), so it was not imposed",
            ) from error
        return action.perform(request)

    def _action(self, request: ActionRequest) -> Action:
        key = f"{request.action} {json.dumps(request.params, sort_keys=True, default=list)}"
        action = self._actions.get(key)
        if action is None:
            action = self._actions[key] = base.create(request.action, request.params, self._context)
        return action

    def _finish(self, request: ActionRequest, started_s: float, attempt: Attempt) -> None:
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
                self_expiring=base.is_self_expiring(request.action)
                if request.action in base.kinds()
                else False,
                step=request.step,
            )
        )


def give_back_all(context: Context, outstanding: Outstanding, deadline_s: float) -> list[str]:
    """Clear every lease and restore every outstanding lever at once; the problems, one line each."""
    problems = clear_leases(context)
    done: deque[str] = deque()
    threads = [
        threading.Thread(target=_give_back, args=(context, outstanding, entry, deadline_s, done), daemon=True)
        for entry in outstanding.entries()
    ]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + deadline_s + 2.0
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    return problems + list(done)


def clear_leases(context: Context) -> list[str]:
    """Remove every lease file; a directory that is not there holds none."""
    from kvwatch import wire

    problems = []
    try:
        names = [path.stem for path in context.limits_dir.glob("*.json")]
    except OSError as error:
        return [f"{context.limits_dir}: {error.strerror}"]
    for name in names:
        try:
            wire.clear(context.limits_dir, name)
        except OSError as error:
            problems.append(f"{context.limits_dir}/{name}.json: {error.strerror}")
    return problems


def restore_request(entry: Entry, deadline_s: float) -> ActionRequest:
    """The request that gives one entry back, on the lane of its server."""
    return ActionRequest(
        request_id=f"restore-{entry.server}-{int(time.time() * 1000)}",
        target=f"limit/{entry.server}",
        action=entry.action,
        params=entry.params,
        event=EventKind.RESTORE,
        limit=Limit(server=entry.server),
        deadline_s=deadline_s,
        reason="kvwatch stops or was not running",
    )


def _give_back(
    context: Context, outstanding: Outstanding, entry: Entry, deadline_s: float, problems: deque[str]
) -> None:
    request = restore_request(entry, deadline_s)
    try:
        base.create(entry.action, entry.params, context).perform(request)
    except ActionError as error:
        problems.append(f"{entry.server} via {entry.action}: {error}")
        log.error("limit not given back: %s via %s: %s", entry.server, entry.action, error)
        return
    outstanding.remove(entry)
