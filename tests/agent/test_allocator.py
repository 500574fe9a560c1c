"""What the sums of a snapshot say, against the long way round."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from kvwatch.agent.allocator import GUARD_BYTES, largest_allocatable, layout
from tests.agent.build import GIB, MIB, random_snapshot, segment

FIXTURES = Path(__file__).parent.parent / "fixtures" / "torch"
LIVE, FREE = "active_allocated", "inactive"


def brute(segments: list[dict[str, Any]], device: int) -> dict[tuple[Any, ...], dict[str, int]]:
    """Sums per arena, byte by byte where pages matter (in units of 512 bytes), from the definitions alone."""

    def key(one: dict[str, Any]) -> tuple[Any, ...]:
        return one["stream"], one["segment_pool_id"], one["segment_type"]

    here = sorted((one for one in segments if one["device"] == device), key=key)
    return {found: _brute_arena(list(group)) for found, group in groupby(here, key)}


def _brute_arena(group: list[dict[str, Any]]) -> dict[str, int]:
    free = [block["size"] for one in group for block in one["blocks"] if block["state"] == FREE]
    return {
        "reserved": sum(block["size"] for one in group for block in one["blocks"]),
        "allocated": sum(b["size"] for one in group for b in one["blocks"] if b["state"] == LIVE),
        "free": sum(free),
        "largest": max(free, default=0),
        "releasable": sum(_brute_releasable(one) for one in group),
    }


def _brute_releasable(one: dict[str, Any]) -> int:
    if not one["is_expandable"]:
        whole = all(block["state"] == FREE for block in one["blocks"])
        return one["total_size"] if whole else 0
    page = (2 if one["segment_type"] == "small" else 20) * MIB
    live = [
        (block["address"], block["address"] + block["size"])
        for block in one["blocks"]
        if block["state"] != FREE
    ]
    pages = range(one["address"], one["address"] + one["total_size"], page)
    return page * sum(
        all(end <= at or begin >= at + page for begin, end in live)
        for at in pages
        if at + page <= one["address"] + one["total_size"]
    )


@pytest.mark.parametrize("expandable", [False, True], ids=["fixed", "expandable"])
@pytest.mark.parametrize("seed", range(60))
def test_sums_equal_brute_force(seed: int, *, expandable: bool) -> None:
    """Every sum of every arena equals the one counted from the definitions, and private pools stay apart."""
    segments = random_snapshot(seed, expandable=expandable)

    for device in (0, 1):
        found, expected = layout(segments, device), brute(segments, device)
        shared = {key: sums for key, sums in expected.items() if key[1] == (0, 0)}
        assert found.reserved_bytes == sum(sums["reserved"] for sums in shared.values())
        assert found.free_bytes == sum(sums["free"] for sums in shared.values())
        assert found.releasable_bytes == sum(sums["releasable"] for sums in shared.values())
        assert found.private_bytes == sum(
            sums["reserved"] for key, sums in expected.items() if key[1] != (0, 0)
        )
        named = {
            f"{kind}/{stream}" if pool == (0, 0) else f"{kind}/{stream}/{pool[0]}.{pool[1]}": sums
            for (stream, pool, kind), sums in expected.items()
        }
        for arena in found.arenas:
            sums = named[arena.name]
            assert arena.reserved_bytes == sums["reserved"]
            assert arena.allocated_bytes == sums["allocated"]
            assert arena.free_bytes == sums["free"]
            assert arena.largest_free_bytes == sums["largest"]
            assert arena.releasable_bytes == sums["releasable"]


@pytest.mark.parametrize("seed", range(30))
def test_parts_of_the_reserved_add_up(seed: int) -> None:
    """Soft and hard together are the free share; each is between 0 and 1."""
    found = layout(random_snapshot(seed, expandable=seed % 2 == 0), 0)
    if found.soft_ratio is None or found.hard_ratio is None:
        assert found.reserved_bytes == 0
        return

    assert 0 <= found.soft_ratio <= 1
    assert 0 <= found.hard_ratio <= 1
    assert found.soft_ratio + found.hard_ratio == pytest.approx(found.free_bytes / found.reserved_bytes)


def test_thousand_free_segments_are_soft() -> None:
    """1000 free segments of 2 MiB read 0.999 by the old formula although one call gives all of it back."""
    found = layout([segment([(2 * MIB, FREE)], address=index << 30) for index in range(1000)], 0)

    assert found.total_ratio == pytest.approx(0.999)
    assert found.soft_ratio == 1.0
    assert found.hard_ratio == 0.0


def test_case_J4_soft_hard_and_other_streams_are_told_apart() -> None:
    """Whole free segments, holes between live blocks, and another stream's free memory are three things."""
    segments = [
        segment([(1 * GIB, FREE)], address=0),
        segment([(1 * GIB, LIVE), (1 * GIB, FREE), (1 * GIB, LIVE)], address=8 * GIB),
        segment([(2 * GIB, LIVE), (2 * GIB, FREE)], address=16 * GIB, stream=7),
    ]
    found = layout(segments, 0)

    assert found.releasable_bytes == 1 * GIB
    assert found.free_bytes - found.releasable_bytes == 3 * GIB
    assert {arena.name: arena.free_bytes for arena in found.arenas} == {
        "large/0": 2 * GIB,
        "large/7": 2 * GIB,
    }


def test_case_J3_zero_is_good() -> None:
    """An allocator without a free byte has no fragmentation: 0 is good, 1 is bad."""
    found = layout([segment([(4 * GIB, LIVE)])], 0)

    assert found.soft_ratio == 0.0
    assert found.hard_ratio == 0.0
    assert found.total_ratio is None


def test_case_I4_private_pools_are_apart() -> None:
    """What CUDA graphs keep in pools of their own is neither free nor releasable for anybody else."""
    found = layout([segment([(3 * GIB, FREE)], pool=(0, 1)), segment([(1 * GIB, LIVE)], address=1 << 40)], 0)

    assert found.private_bytes == 3 * GIB
    assert found.free_bytes == 0
    assert found.releasable_bytes == 0
    assert largest_allocatable(found, 0) == 0


def test_little_free_memory_says_nothing() -> None:
    """The old formula is not told where hardly anything is free."""
    blocks = [(20 * GIB, LIVE), (1 * MIB, FREE), (1 * GIB, LIVE), (1 * MIB, FREE)]

    assert layout([segment(blocks)], 0).total_ratio is None


def test_largest_allocatable_without_expandable() -> None:
    """A block that is there, or the device's free memory with what the allocator returns: the larger."""
    segments = [
        segment([(1 * GIB, FREE)], address=0),
        segment([(1 * GIB, LIVE), (3 * GIB, FREE)], address=1 << 40),
    ]
    found = layout(segments, 0)

    assert largest_allocatable(found, 0) == 3 * GIB
    assert largest_allocatable(found, GUARD_BYTES + 4 * GIB) == 5 * GIB
    assert largest_allocatable(found, GUARD_BYTES + 4 * GIB, cap_bytes=2 * GIB) == 3 * GIB
    assert largest_allocatable(found, GUARD_BYTES + 4 * GIB, cap_bytes=-5) == 3 * GIB


def test_largest_allocatable_with_expandable() -> None:
    """The free end of an expandable range grows into new pages; no byte of it counts twice."""
    page = 20 * MIB
    blocks = [(30 * page + 7 * MIB, LIVE), (9 * page + 13 * MIB, FREE)]
    found = layout([segment(blocks, expandable=True)], 0)

    assert found.releasable_bytes == 9 * page
    assert largest_allocatable(found, GUARD_BYTES + GIB) == GIB + 9 * page + 13 * MIB


def test_last_range_is_the_one_that_grows() -> None:
    """Of several mapped ranges of one stream only the end of the highest can grow."""
    low = segment(
        [(20 * MIB, LIVE), (19 * MIB, FREE), (1 * MIB, LIVE), (7 * MIB, FREE)],
        address=1 << 40,
        expandable=True,
    )
    high = segment([(37 * MIB, LIVE), (3 * MIB, FREE)], address=2 << 40, expandable=True)

    for segments in ([low, high], [high, low]):
        assert layout(segments, 0).growable_bytes == 3 * MIB


@pytest.mark.parametrize("name", ["default", "expandable"])
def test_recorded_run_keeps_its_promises(name: str) -> None:
    """On a recorded H200, what counted as whole free segments is what emptying the cache gave back."""
    rows = {row["tag"]: row for row in json.loads((FIXTURES / f"h200_{name}.json").read_text())}
    before, after = rows["checkerboard"], rows["after empty_cache"]
    reserved = "reserved_bytes.all.current"
    came_back = before[reserved] - after[reserved]

    if name == "default":
        assert came_back == before["whole_free_segments"]
        assert after["whole_free_segments"] == 0
    else:
        assert before["whole_free_segments"] == 0, "ranges are never whole: pages inside them came back"
        assert came_back % (20 * MIB) % (2 * MIB) == 0
        assert 0 < came_back < before["inactive"]
    assert after["cuda_free"] - before["cuda_free"] == came_back


def test_case_J1_inactive_split_is_blind_there() -> None:
    """The recorded counter reads 0 with expandable segments while gigabytes were free inside them."""
    rows = json.loads((FIXTURES / "h200_expandable.json").read_text())
    board = next(row for row in rows if row["tag"] == "checkerboard")

    assert board["inactive_split_bytes.all.current"] == 0
    assert board["inactive"] > 10 * GIB
