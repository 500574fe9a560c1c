"""The long checks, short: that they run, judge, and find a healthy kvwatch healthy."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.endurance import attackers, chaos, flood, soak
from checks.endurance.page import Counters, Page, complaints


def page(text: str) -> Page:
    return Page(text.encode())


def ledger(total: int, *parts: int) -> Page:
    rows = [
        f'kvwatch_gpu_memory_ledger_bytes{{uuid="GPU-1",part="p{i}"}} {part}\n'
        for i, part in enumerate(parts)
    ]
    return page("".join(rows) + f'kvwatch_gpu_memory_total_bytes{{uuid="GPU-1"}} {total}\n')


def test_a_ledger_that_does_not_add_up_is_seen() -> None:
    """A byte too few, a total that is not there, and a part below zero are complaints; a good one is none."""
    assert list(complaints(ledger(10, 3, 7))) == []
    assert any("adds up to 9" in one for one in complaints(ledger(10, 3, 6)))
    assert any("below zero" in one for one in complaints(ledger(10, -1, 11)))


def test_green_without_a_value_and_nan_are_seen() -> None:
    """A rule that is green while its input is not on the page is a complaint, and so is NaN."""
    green = 'kvwatch_rule_level{rule="kv_usage",server="chat"} 0\n'
    value = 'kvwatch_kv_usage_ratio{server="chat"} 0.5\n'
    assert list(complaints(page(green + value))) == []
    assert any("green without a value" in one for one in complaints(page(green)))
    assert any("NaN" in one for one in complaints(page(value.replace("0.5", "NaN"))))


def test_a_counter_that_goes_back_is_seen() -> None:
    """kvwatch's own counters may only grow while it lives; those of a server may begin anew."""
    seen = Counters()
    for value in (1, 2, 2):
        assert list(seen.complaints(page(f"kvwatch_ticks_missed_total {value}\n"))) == []
    assert len(list(seen.complaints(page("kvwatch_ticks_missed_total 1\n")))) == 1
    for value in (5, 0):
        assert list(seen.complaints(page(f'kvwatch_preemptions_total{{server="chat"}} {value}\n'))) == []


@pytest.mark.needs("gcc")
def test_half_a_minute_of_chaos(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A fixed seed: faults of several kinds come, and no invariant is violated."""
    assert chaos.chaos(tmp_path, 25.0, seed=11), capfd.readouterr().out


def test_twenty_seconds_of_soak(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two stories at twenty times their speed: every page keeps to the rules."""
    assert soak.soak(tmp_path, 20.0, 20.0, grown=False), capfd.readouterr().out


def test_a_few_seconds_of_flood(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody is refused and memory stays within its bound; how fast the answers are is not judged here."""
    few = {"idle": 400, "drip": 60, "header": 1}
    short = flood.Flood(name="plain", kinds=few, seconds=4.0, timed=False)
    assert flood.plain_flood(tmp_path / "plain", short), capfd.readouterr().out
    few = {"idle": 200, "hello": 60, "handshake": 60, "drip": 20}
    short = flood.Flood(name="TLS", kinds=few, seconds=4.0, timed=False)
    assert flood.tls_flood(tmp_path / "tls", short), capfd.readouterr().out


def test_attackers_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    """More sockets than the bound, or a kind that is not known, are refused before anything is opened."""
    assert attackers.main(["1", "idle=2000"]) == 2
    assert attackers.main(["1", "dream=1"]) == 2
    assert "at most" in capsys.readouterr().err
