"""The ring of the last ten minutes: what is in it, what it costs, and that it never grows."""

from __future__ import annotations

import math
from dataclasses import replace

from kvwatch.core.curves import MAX_TRACKS, ROWS, SPAN_S, Cut, Ring
from kvwatch.model.gpu import GpuMemory, GpuState
from kvwatch.model.level import Level, RuleId, Scope, Verdict
from kvwatch.model.report import GpuReport, ServerReport, TickClock, TickReport
from kvwatch.model.settings import Mode
from kvwatch.model.signal import EngineSignals, GpuSignals, ServerSignals
from kvwatch.rules.shipped import SPECS

CHAT, GPU = ("chat", "0", ""), ("", "", "GPU-0")
PAGING = tuple(spec.rule for spec in SPECS if spec.pages)


def engine(server: str, **changes: object) -> ServerReport:
    """A server of one engine, every figure known."""
    figures = EngineSignals(
        server=server, engine="0", kv_usage_ratio=0.5, running=8, waiting=2,
        preemptions_per_s=0.0, recompute_tax_ratio=0.0,
    )  # fmt: skip
    made = replace(figures, **changes)  # type: ignore[arg-type]
    signals = ServerSignals(server=server, engines=(made,))
    return ServerReport(server=server, kind="vllm", url="", state=None, signals=signals, up=True, age_s=0.1)


def gpu(index: int, used: int = 2**30) -> GpuReport:
    """A GPU that reports its memory."""
    memory = GpuMemory(total_bytes=2**37, used_bytes=used, free_bytes=2**37 - used)
    state = GpuState(uuid=f"GPU-{index}", index=index, memory=memory, used_peak_bytes=used)
    signals = GpuSignals(uuid=state.uuid, index=index, headroom_bytes=2**37 - used)
    return GpuReport(state=state, signals=signals, up=True, age_s=0.1)


def verdict(rule: RuleId, scope: Scope, level: Level = Level.GREEN, **changes: object) -> Verdict:
    made = Verdict(rule=rule, scope=scope, level=level, since_s=0.0, since_wall_s=0.0, pages=rule in PAGING)
    return replace(made, **changes)  # type: ignore[arg-type]


def report(now_s: float, **parts: object) -> TickReport:
    clock = TickClock(mono_s=now_s, wall_s=1.7e9 + now_s)
    made = TickReport(tick=1, clock=clock, version="1", mode=Mode.ADVISE, headline=Level.GREEN)
    return replace(made, **parts)  # type: ignore[arg-type]


def column(cut: Cut, place: tuple[str, str, str], name: str) -> list[float]:
    (track,) = [track for track in cut.tracks if track.place == place]
    return list(track.values[name])


def crowd(servers: int, gpus: int, seconds: int = 1) -> Ring:
    """A ring that has seen so many servers and GPUs, with every paging rule judged on each."""
    ring = Ring()
    names = [f"s{number}" for number in range(servers)]
    verdicts = [
        verdict(rule, Scope(server=name, engine="0"), value=1.0) for name in names for rule in PAGING[:6]
    ]
    verdicts += [verdict(RuleId.SERVER_DOWN, Scope(server=name)) for name in names]
    verdicts += [
        verdict(rule, Scope(uuid=f"GPU-{n}"), value=1.0) for n in range(gpus) for rule in PAGING[2:8]
    ]
    for second in range(seconds):
        ring.offer(
            report(
                float(second),
                servers=tuple(engine(name) for name in names),
                gpus=tuple(gpu(n) for n in range(gpus)),
                verdicts=tuple(verdicts),
            )
        )
    return ring


def test_one_row_a_second_however_often_reports_come() -> None:
    """Fifty reports a second leave one row a second, and rows older than ten minutes are cut off."""
    ring = Ring()
    for number in range(50 * 700):
        now_s = number / 50
        if number % 50 < 3:  # the others differ in nothing that matters here
            ring.offer(report(now_s, servers=(engine("chat", running=int(now_s)),)))
    cut = ring.cut([CHAT], 699.0 - SPAN_S, zero_s=699.0)

    assert len(cut.t_s) == 601
    assert (cut.t_s[0], cut.t_s[-1]) == (-600.0, 0.0)
    assert column(cut, CHAT, "running") == [float(value) for value in range(99, 700)]


def test_the_moment_of_red_is_kept_out_of_turn() -> None:
    """`keep` adds a row though the last is younger than a second, and not a second one of the same report."""
    ring = Ring()
    ring.offer(report(10.0, gpus=(gpu(0, used=100),)))
    red = report(10.3, gpus=(gpu(0, used=900),))
    ring.offer(red)
    ring.keep(red)
    ring.keep(red)
    cut = ring.cut([GPU], 0.0, zero_s=10.3)

    assert column(cut, GPU, "used_bytes") == [100.0, 900.0]


def test_what_is_not_known_is_no_zero() -> None:
    """A figure that is missing or beyond every float is unknown, and so is each of a server that is away."""
    ring = Ring()
    away = replace(engine("chat"), up=False)
    for second, each in enumerate(
        [engine("chat"), engine("chat", kv_usage_ratio=None), away, engine("chat", running=10**400)]
    ):
        ring.offer(report(float(second), servers=(each,)))
    cut = ring.cut([CHAT], 0.0, zero_s=3.0)
    plain = cut.plain()["tracks"][0]["values"]  # type: ignore[index]

    assert [math.isnan(value) for value in column(cut, CHAT, "kv_usage_ratio")] == [False, True, True, False]
    assert plain["kv_usage_ratio"] == [0.5, None, None, 0.5]
    assert plain["running"] == [8.0, 8.0, None, None]


def test_levels_are_those_of_paging_rules() -> None:
    """The level of a rule that pages is kept row by row, that of another is not."""
    ring = Ring()
    where = Scope(server="chat", engine="0")
    for second, level in enumerate((Level.GREEN, Level.RED)):
        both = (verdict(RuleId.RECOMPUTE_TAX, where, level), verdict(RuleId.KV_USAGE, where, level))
        ring.offer(report(float(second), verdicts=both))
    ring.offer(report(2.0))
    (track,) = ring.cut([CHAT], 0.0, zero_s=2.0).plain()["tracks"]  # type: ignore[misc, attr-defined]

    assert track["levels"] == {"recompute_tax": [0, 2, None]}


def test_a_place_that_is_gone_is_forgotten_and_too_many_are_refused() -> None:
    """Servers that come and go for ever, or all at once, do not grow the ring."""
    ring = Ring()
    for second in range(0, 5000, 50):
        ring.offer(report(float(second), servers=(engine(f"s{second}"),)))
    assert len(ring.places()) <= SPAN_S / 50 + 1

    ring = Ring(rows=4, max_tracks=10)
    ring.offer(report(0.0, gpus=(gpu(0),), servers=tuple(engine(f"s{n}") for n in range(50))))
    assert len(ring.places()) == 10
    assert GPU in ring.places()


def test_the_ring_costs_a_fiftieth_of_what_the_daemon_may_take() -> None:
    """8 GPUs with a server each: under 0.4 MiB of the daemon's 45; 64 servers: under 1.8 MiB of 90."""
    small, large, full = crowd(8, 8), crowd(64, 8), crowd(MAX_TRACKS, 0)
    print({"8 GPUs": small.size_bytes, "64 servers": large.size_bytes, "most": full.size_bytes})

    assert small.size_bytes < 0.4 * 2**20
    assert large.size_bytes < 1.8 * 2**20
    assert full.size_bytes < 12 * 2**20
    assert crowd(8, 8, seconds=2 * ROWS).size_bytes == small.size_bytes
