"""Give back what is out: at stop, at start after a crash, and by `kvwatch restore`."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from kvwatch import wire
from kvwatch.actions import base
from kvwatch.actions.base import ActionError, Context
from kvwatch.control.target import HOOK_DEADLINE_S
from kvwatch.daemon.outstanding import Entry, Outstanding
from kvwatch.model.action import ActionRequest, EventKind, Limit, Outcome

log = logging.getLogger("kvwatch.giveback")

# What a give-back may take beside the hook's own time: ending its group, and the disk.
GIVE_BACK_GRACE_S = 4.0


def give_back_all(context: Context, outstanding: Outstanding, *, longest_s: float) -> list[str]:
    """Clear every lease and restore every outstanding lever at once; the problems, one line each.

    Each lever gets its own deadline, at most `longest_s`, and the same time for a program that a
    dead run left at it.
    """
    problems: deque[str] = deque(clear_leases(context))
    waiting = [
        (entry, threading.Thread(target=_give_back, args=(context, outstanding, entry, longest_s, problems)))
        for entry in outstanding.entries()
    ]
    for _, thread in waiting:
        thread.daemon = True
        thread.start()
    end_s = time.monotonic() + 2 * longest_s + GIVE_BACK_GRACE_S
    for entry, thread in waiting:
        thread.join(max(0.0, end_s - time.monotonic()))
        if thread.is_alive():
            problems.append(f"{entry.server} via {entry.action}: no end to it")
    return list(problems)


def clear_leases(context: Context) -> list[str]:
    """Remove every lease file; a directory that is not there holds none."""
    problems = []
    try:
        names = sorted(path.name.removesuffix(".json") for path in context.limits_dir.glob("*.json"))
    except OSError as error:
        return [f"{context.limits_dir}: {error.strerror}"]
    for name in names:
        try:
            wire.clear(context.limits_dir, name)
        except OSError as error:
            problems.append(f"{context.limits_dir}/{name}.json: {error.strerror}")
    return problems


def restore_request(entry: Entry, longest_s: float) -> ActionRequest:
    """The request that gives one entry back, on the lane of its server."""
    own_s = entry.params.get("deadline_s")
    deadline_s = float(own_s) if isinstance(own_s, int | float) else HOOK_DEADLINE_S
    return ActionRequest(
        request_id=f"restore-{entry.server}-{int(time.time() * 1000)}",
        target=f"limit/{entry.server}",
        action=entry.action,
        params=entry.params,
        event=EventKind.RESTORE,
        limit=Limit(server=entry.server),
        deadline_s=min(deadline_s, longest_s),
        reason="kvwatch stops or was not running",
    )


def _give_back(
    context: Context, outstanding: Outstanding, entry: Entry, longest_s: float, problems: deque[str]
) -> None:
    where = f"{entry.server} via {entry.action}"
    request = restore_request(entry, longest_s)
    try:
        with outstanding.lever(entry, longest_s) as (held, had):
            base.create(entry.action, entry.params, context).perform(request, held)
            if had:
                outstanding.remove(entry)
                return
        raise ActionError(Outcome.FAILED, "given back, but an earlier program of ours is still at it")
    except ActionError as error:
        problems.append(f"{where}: {error}")
