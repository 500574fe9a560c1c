"""Samples: a value or a failure, always with its age."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class FailureKind(enum.StrEnum):
    """What kind of failure a source met; a closed set, so that it can be counted."""

    REFUSED = "refused"  # nobody listens
    TIMED_OUT = "timed_out"  # the total deadline passed
    BROKEN = "broken"  # the connection broke off, or the answer was cut short
    HTTP_STATUS = "http_status"  # an answer, but not 200 (redirects included)
    UNAUTHORISED = "unauthorised"
    TLS = "tls"
    TOO_LARGE = "too_large"  # larger or deeper than the caps
    MALFORMED = "malformed"  # not what the dialect says it is
    NOT_EXPECTED = "not_expected"  # well-formed, but without the series this engine must have
    LOADING = "loading"  # the server says that it is still loading
    STUCK = "stuck"  # a call has not returned within its deadline
    CRASHED = "crashed"  # the worker process died
    NO_DRIVER = "no_driver"  # no library, no driver, or no device
    VERSION_MISMATCH = "version_mismatch"  # library and driver disagree (after an upgrade)
    DENIED = "denied"
    PAUSED = "paused"  # released for maintenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why there is no value: a kind for machines, a sentence with the fix for people."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Generic[T]):
    """One reading of one source: exactly one of `value` and `failure` is set.

    `observed_s` is monotonic seconds when the reading was complete, `wall_s` Unix seconds of the
    same moment (display only), `took_s` how long it took.
    """

    source: str
    observed_s: float
    wall_s: float
    took_s: float = 0.0
    value: T | None = None
    failure: Failure | None = None

    def age_s(self, now_s: float) -> float:
        """Seconds since this was observed, on the monotonic clock."""
        return max(0.0, now_s - self.observed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """What is known about one source, whether or not it has ever answered.

    `period_s` is the expected interval between good samples; `good_total` counts them,
    `good_streak` counts those since the last failure or reset; errors are counted for ever.
    """

    source: str
    period_s: float
    up: bool = False
    stuck: bool = False
    good_total: int = 0
    good_streak: int = 0
    errors_total: int = 0
    last_success_s: float | None = None  # monotonic
    last_success_wall_s: float | None = None  # Unix seconds
    last_took_s: float | None = None
    failure: Failure | None = None  # of the newest attempt
    paused: bool = False
