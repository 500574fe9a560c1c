"""What does a short KV pool cost? Preemptions, and the work that is done twice because of them.

A preempted request loses its blocks and is computed again. Where the server does not count those tokens
itself, each preemption is taken to cost half a mean request: 0.5 * (u * N_tokens / R), halved because
the victim is the youngest request. Known bias: about right on chat, up to 2x too high or low on other
lengths (against a simulator's truth).

Tokens are not time: recomputation is prefill, which is far cheaper per token than decoding. The share of
engine *time* is recomputed tokens per second over the highest prompt-token rate ever seen. Known bias: with
short prompts the highest rate seen is far below what the engine could do, so the share reads too high (up
to 30 % where it was 0.8 %); prompt tokens served from the prefix cache raise that rate and make it read
too low. The cached-token counter is not subtracted, since recomputed prompts inflate it (vllm#25780).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvwatch.model.server import EngineState
from kvwatch.signals.occupancy import capacity_tokens
from kvwatch.signals.series import due, increase

WINDOW_S = 60.0
SPACING_S = 1.0
MOST_TOKENS_PER_S = 1e8
"""No engine computes more: a faster growth is no rate, but a page that leapt."""

RATE_INTERVAL_S = 1.0
"""Highest rates are taken over at least this: prompts are counted in lumps when their prefill ends."""

VICTIM_SHARE = 0.5


class Row(NamedTuple):
    """Counters at one moment; `recomputed` is the server's own or our running estimate."""

    time_s: float
    preemptions: float | None
    prompt: float | None
    generation: float | None
    recomputed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureTrack:
    """Counter rows of the last minute and the highest rates ever seen."""

    rows: tuple[Row, ...]
    newest: Row
    interval_start: Row
    own_counter: bool
    request_tokens: float | None = None
    max_prompt_per_s: float | None = None
    max_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Rates and shares over the window (see the module's text for what they mean)."""

    preemptions_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    generation_tokens_per_s: float | None = None
    tax_ratio: float | None = None
    tokens_ratio: float | None = None


def begin(
    engine: EngineState, usage: float | None, now_s: float, before: PressureTrack | None = None
) -> PressureTrack:
    """Start counting anew (first reading, or a restart); the highest rates of `before` live on."""
    counters = engine.scheduler
    own = counters.recomputed_tokens_total
    unknown = own is None and counters.preemptions_total is None
    row = _row(engine, now_s, None if unknown else float(own or 0.0))
    return PressureTrack(
        rows=(row,),
        newest=row,
        interval_start=row,
        own_counter=own is not None,
        request_tokens=_request_tokens(engine, usage),
        max_prompt_per_s=before.max_prompt_per_s if before else None,
        max_tokens_per_s=before.max_tokens_per_s if before else None,
    )


def advance(track: PressureTrack, engine: EngineState, usage: float | None, now_s: float) -> PressureTrack:
    """Take in one later reading of the same engine without a restart in between."""
    counters = engine.scheduler
    own = counters.recomputed_tokens_total
    size = _request_tokens(engine, usage)
    if size is None:
        size = track.request_tokens
    recomputed = _estimate(track, counters.preemptions_total, size) if own is None else float(own)
    row = _row(engine, now_s, recomputed)
    rows = track.rows
    if recomputed is None or (own is not None) != track.own_counter:
        rows = _forget_recomputed(rows)
    start, prompt_rate, token_rate = _highest(track, row)
    return PressureTrack(
        rows=_keep(rows, row),
        newest=row,
        interval_start=start,
        own_counter=own is not None,
        request_tokens=size,
        max_prompt_per_s=prompt_rate,
        max_tokens_per_s=token_rate,
    )


def _row(engine: EngineState, now_s: float, recomputed: float | None) -> Row:
    counters = engine.scheduler
    return Row(
        now_s,
        counters.preemptions_total,
        counters.prompt_tokens_total,
        counters.generation_tokens_total,
        recomputed,
    )


def _forget_recomputed(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Make the estimate start anew: what comes later cannot be compared with these rows."""
    if rows[-1].recomputed is None:
        return rows
    return tuple(row._replace(recomputed=None) for row in rows)


def _request_tokens(engine: EngineState, usage: float | None) -> float | None:
    """Mean tokens that a running request holds: u * N_tokens / R."""
    slots, running = capacity_tokens(engine.kv), engine.scheduler.running
    if usage is None or slots is None or running is None or running <= 0:
        return None
    return usage * slots / running


def _estimate(track: PressureTrack, preemptions: float | None, size: float | None) -> float | None:
    """The running estimate of recomputed tokens after this reading; None when it cannot be continued."""
    grown = increase(preemptions, track.newest.preemptions)
    if grown is None:
        return None
    if grown == 0:
        return track.newest.recomputed or 0.0
    return None if size is None else (track.newest.recomputed or 0.0) + VICTIM_SHARE * grown * size


def _keep(rows: tuple[Row, ...], row: Row) -> tuple[Row, ...]:
    if not due(rows[-1].time_s, row.time_s, SPACING_S):
        return rows
    first = 0
    while first + 1 < len(rows) and rows[first + 1].time_s <= row.time_s - WINDOW_S:
        first += 1
    return (*rows[first:], row)


def _highest(track: PressureTrack, row: Row) -> tuple[Row, float | None, float | None]:
    """Close a rate interval if it is long enough: its successor's start and the highest rates so far."""
    start = track.interval_start
    if not due(start.time_s, row.time_s, RATE_INTERVAL_S):
        return start, track.max_prompt_per_s, track.max_tokens_per_s
    took_s = row.time_s - start.time_s
    prompt, generation = increase(row.prompt, start.prompt), increase(row.generation, start.generation)
    both = None if prompt is None and generation is None else (prompt or 0.0) + (generation or 0.0)
    return row, _higher(track.max_prompt_per_s, prompt, took_s), _higher(track.max_tokens_per_s, both, took_s)


def _higher(highest: float | None, amount: float | None, took_s: float) -> float | None:
    if not amount:
        return highest
    rate = amount / took_s
    return highest if rate > MOST_TOKENS_PER_S else max(highest or 0.0, rate)


def pressure(track: PressureTrack) -> Pressure:
    """Rates and shares over the last minute, or since the start if that is shorter."""
    newest = track.newest
    base = _base(track.rows, newest.time_s)
    took_s = newest.time_s - base.time_s
    if took_s <= 0:
        return Pressure()
    preempted, prompt, generation = (
        increase(newest.preemptions, base.preemptions),
        increase(newest.prompt, base.prompt),
        increase(newest.generation, base.generation),
    )
    tax_ratio, tokens_ratio = _recomputation(track, base)
    return Pressure(
        preemptions_per_s=_per_s(preempted, took_s),
        prompt_tokens_per_s=_per_s(prompt, took_s),
        generation_tokens_per_s=_per_s(generation, took_s),
        tax_ratio=tax_ratio,
        tokens_ratio=tokens_ratio,
    )


def _recomputation(track: PressureTrack, base: Row) -> tuple[float | None, float | None]:
    """Shares of time and of tokens, counted from the oldest row whose estimate still holds."""
    newest = track.newest
    if base.recomputed is None:
        base = next((row for row in track.rows if row.recomputed is not None), newest)
    took_s = newest.time_s - base.time_s
    if took_s <= 0:
        return None, None
    recomputed = increase(newest.recomputed, base.recomputed)
    prompt, generation = increase(newest.prompt, base.prompt), increase(newest.generation, base.generation)
    tax_ratio = time_share(_per_s(recomputed, took_s), track.max_prompt_per_s)
    return tax_ratio, token_share(recomputed, prompt, generation)


def _base(rows: tuple[Row, ...], now_s: float) -> Row:
    base = rows[0]
    for row in rows[1:]:
        if row.time_s > now_s - WINDOW_S:
            break
        base = row
    return base


def _per_s(amount: float | None, took_s: float) -> float | None:
    return None if amount is None else amount / took_s


def time_share(recomputed_per_s: float | None, max_prompt_per_s: float | None) -> float | None:
    """Share of engine time spent recomputing: tokens per second over what prefill can do, at most 1."""
    if recomputed_per_s is None:
        return None
    if recomputed_per_s == 0:
        return 0.0
    return min(1.0, recomputed_per_s / max_prompt_per_s) if max_prompt_per_s else None


def token_share(recomputed: float | None, prompt: float | None, generation: float | None) -> float | None:
    """Share of all computed tokens (prompt, generation and recomputed) that were computed again."""
    if recomputed is None or prompt is None or generation is None:
        return None
    computed = recomputed + prompt + generation
    return recomputed / computed if computed > 0 else 0.0
