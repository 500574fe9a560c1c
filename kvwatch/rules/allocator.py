"""How bad is it inside a server's allocator? Only where an agent tells; absent data never judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvwatch.model.level import Reason, Scope
from kvwatch.model.server import AllocatorState
from kvwatch.rules.kv import MIN_SAMPLES
from kvwatch.rules.spec import Reading
from kvwatch.rules.views import AgentView, Inputs


def alloc_retries(inputs: Inputs) -> Iterator[Reading]:
    """Times in the last minute that the allocator had to free its cache and try again."""
    return _worst(inputs, lambda view: view.memory.retries_in_window, max)


def largest_allocatable(inputs: Inputs) -> Iterator[Reading]:
    """Bytes of the largest single allocation that would succeed now, on the worst rank."""
    return _worst(inputs, lambda view: _allocator(view).largest_allocatable_bytes, min)


def allocator_fragmentation(inputs: Inputs) -> Iterator[Reading]:
    """Share of reserved memory that is free but interleaved with live blocks, on the worst rank."""
    return _worst(inputs, lambda view: _allocator(view).fragmentation_hard_ratio, max)


_NOTHING = AllocatorState()


def _allocator(view: AgentView) -> AllocatorState:
    return view.state.allocator or _NOTHING


def _worst(
    inputs: Inputs,
    value_of: Callable[[AgentView], float | None],
    worse: Callable[[float, float], float],
) -> Iterator[Reading]:
    """Yield a reading per scope; ranks that share one (no GPU named) are judged by the worst of them."""
    found: dict[Scope, Reading] = {}
    for view in inputs.agents:
        reading = _reading(view, value_of(view))
        before = found.get(view.scope)
        if before is not None and before.value is not None and before.absent is None:
            if reading.absent is not None or reading.value is None:
                continue
            if worse(before.value, reading.value) == before.value:
                continue
        found[view.scope] = reading
    return iter(found.values())


def _reading(view: AgentView, value: float | None) -> Reading:
    absent = Reason.NOT_REPORTED if value is None else None
    if view.memory.samples < MIN_SAMPLES:
        absent = Reason.TOO_FEW
    if not view.fresh:
        absent = Reason.STALE
    return Reading(scope=view.scope, value=value, absent=absent, period_s=view.period_s)
