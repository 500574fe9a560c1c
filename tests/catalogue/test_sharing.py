"""Rows that are kept while their facts are equal must never outlive a change of the report."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import pytest

from kvwatch.catalogue import metrics_verdict
from kvwatch.exporters.prometheus import Page
from kvwatch.model.report import TickReport
from tests.exporters import sample


def other(value: Any) -> Any:
    """A different value of the same type; NotImplemented where there is none to make."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        members = list(type(value))
        return members[(members.index(value) + 1) % len(members)]
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return NotImplemented


def changed(thing: Any) -> Iterator[Any]:
    """Copies of a thing, each with one leaf anywhere inside it changed."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        for field in dataclasses.fields(thing):
            for value in changed(getattr(thing, field.name)):
                yield dataclasses.replace(thing, **{field.name: value})
    elif isinstance(thing, tuple):
        for place, item in enumerate(thing):
            for value in changed(item):
                yield (*thing[:place], value, *thing[place + 1 :])
        if thing and dataclasses.is_dataclass(thing[0]):
            yield thing[1:]
    else:
        value = other(thing)
        if value is not NotImplemented:
            yield value


def reports() -> list[TickReport]:
    return list(changed(sample.report()))


@pytest.mark.parametrize("openmetrics", [False, True])
def test_every_single_change_of_a_report_shows_as_on_a_fresh_page(openmetrics: bool) -> None:
    """Whatever one thing differs, a page that has rendered the report before equals one that has not."""
    base = sample.report()
    variants = reports()
    assert len(variants) > 500
    old, nothing = Page(), sample.empty_report()
    for variant in variants:
        old.render(base, openmetrics=openmetrics)
        seen = old.render(variant, openmetrics=openmetrics)
        Page().render(nothing, openmetrics=openmetrics)  # what the readers keep is of this one now
        metrics_verdict._LABELS.clear()
        fresh = Page().render(variant, openmetrics=openmetrics)
        assert without_process(seen) == without_process(fresh)


def without_process(page: bytes) -> list[bytes]:
    return [line for line in page.splitlines() if b"process_" not in line.split(b"{")[0]]
