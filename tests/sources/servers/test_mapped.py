"""A server read by the table in the configuration."""

from __future__ import annotations

import pytest

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import Basis, Evictable, ServerState
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.servers import mapped


def parse(page: str, mapping: dict[str, str], **options: str) -> ServerState:
    settings = ServerSettings(name="x", kind="mapped", mapping=mapping, **options)  # type: ignore[arg-type]
    return mapped.parse({"metrics": page.encode()}, settings)


def test_fields_are_read_and_scaled() -> None:
    """A percentage becomes a ratio, labels select, counters are found without their `_total`."""
    page = (
        'cache_pct{pool="kv"} 42.5\ncache_pct{pool="img"} 99\nactive 3\n'
        'tokens_total 500\nms_bucket{le="250"} 4\nms_count 5\n'
    )
    state = parse(
        page,
        {
            "usage_ratio": 'cache_pct{pool="kv"} / 100',
            "running": "active",
            "generation_tokens_total": "tokens",
            "ttft": "ms * 0.001",
            "waiting": "queued",
        },
    )
    engine = state.engines[0]

    assert engine.kv.usage_ratio == pytest.approx(0.425)
    assert (engine.scheduler.running, engine.scheduler.waiting) == (3, None)
    assert engine.scheduler.generation_tokens_total == 500
    assert engine.ttft is not None
    assert engine.ttft.bounds == (0.25,)
    assert any("waiting" in note for note in state.notes)


def test_usage_follows_from_blocks() -> None:
    """With used and total blocks mapped, usage is their ratio."""
    state = parse("used 30\nall 40\n", {"used_blocks": "used", "num_blocks": "all"})

    assert state.engines[0].kv.usage_ratio == 0.75


def test_semantics_are_those_configured() -> None:
    """What usage means is unknown unless the configuration says it."""
    plain = parse("a 1\n", {"running": "a"}).semantics
    told = parse("a 1\n", {"running": "a"}, mapping_evictable="free", mapping_basis="reservation").semantics

    assert (plain.evictable, plain.basis) == (Evictable.UNKNOWN, Basis.OCCUPANCY)
    assert (told.evictable, told.basis) == (Evictable.FREE, Basis.RESERVATION)


def test_engines_and_sums() -> None:
    """Engine labels split; other labels add up for counts, and are refused for a ratio."""
    page = 'n{engine="0",x="a"} 1\nn{engine="0",x="b"} 2\nn{engine="1",x="a"} 4\n'
    state = parse(page, {"running": "n"})

    assert [(e.engine, e.scheduler.running) for e in state.engines] == [("0", 3), ("1", 4)]
    with pytest.raises(SourceError, match="add labels"):
        parse(page, {"usage_ratio": "n / 10"})


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"usage": "a"},
        {"running": "a{"},
        {"running": "a{b=c}"},
        {"running": "a / 0"},
        {"running": "a b"},
        {"running": ""},
    ],
    ids=["empty", "field", "brace", "quotes", "zero", "two", "blank"],
)
def test_bad_table_is_one_clear_error(mapping: dict[str, str]) -> None:
    """A table that cannot be used is refused with the reason."""
    with pytest.raises(SourceError, match="`metrics`") as caught:
        parse("a 1\n", mapping)
    assert caught.value.failure.kind is FailureKind.NOT_EXPECTED


def test_page_without_any_mapped_series_is_refused() -> None:
    """Nothing found is not a server at rest."""
    with pytest.raises(SourceError, match="metrics_path"):
        parse("other 1\n", {"running": "mine"})


def test_selector_labels_may_hold_quotes() -> None:
    """Escapes in label values are understood."""
    selector = mapped.parse_selector('a{x="1", y="q\\"\\\\"} / 4')

    assert selector == mapped.Selector(name="a", labels=(("x", "1"), ("y", 'q"\\')), factor=0.25)
