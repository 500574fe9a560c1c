"""Write a lease file for a reader inside (or in front of) the server. Ends by itself."""

from __future__ import annotations

from collections.abc import Mapping

from kvwatch import wire
from kvwatch.actions.base import Action, ActionError, Attempt, Context
from kvwatch.model.action import ActionRequest, EventKind, Outcome

SELF_EXPIRING = True


class LeaseAction:
    """One lease file. Its sequence numbers grow over restarts of the daemon."""

    self_expiring = SELF_EXPIRING

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seq = -1

    def perform(self, request: ActionRequest, held: int | None = None) -> Attempt:  # noqa: ARG002
        """Write (limit) or remove (restore) the file; read back what it says."""
        limit = request.limit
        if limit is None:
            raise ActionError(Outcome.REFUSED, "a lease carries a limit; this request has none")
        try:
            if request.event is EventKind.RESTORE:
                removed = wire.clear(self._context.limits_dir, limit.server)
                return Attempt(outcome=Outcome.APPLIED if removed else Outcome.NOOP)
            return self._write(request)
        except (OSError, wire.LeaseError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"read back as no lease ({error})"
            raise ActionError(
                Outcome.FAILED,
                f"{self._context.limits_dir}: {reason}; it must be this user's directory, no link, not full",
            ) from error

    def _write(self, request: ActionRequest) -> Attempt:
        limit = request.limit
        if limit is None or request.expires_in_s is None:
            raise ActionError(Outcome.REFUSED, "a lease needs a limit and a time")
        self._seq = wire.next_seq(self._seq)
        lease = wire.Lease(
            server=limit.server,
            boot_id=self._context.boot_id,
            seq=self._seq,
            ttl_s=min(request.expires_in_s, wire.MAX_TTL_S),
            max_running=limit.max_running,
            admit=limit.admit,
            compact=limit.compact,
            reason=request.rule.value if request.rule else request.reason,
        )
        wire.write(self._context.limits_dir, lease)
        written = wire.decode(wire.read_small(f"{self._context.limits_dir}/{limit.server}.json"))
        return Attempt(outcome=Outcome.APPLIED, read_back=written.limit)


def create(params: Mapping[str, object], context: Context) -> Action:
    """A lease has no parameters of its own."""
    if params:
        raise ActionError(Outcome.REFUSED, f"lease takes no parameters, got {', '.join(params)}")
    return LeaseAction(context)
