"""The catalogue against the public contract."""

from __future__ import annotations

import dataclasses
import math

import pytest

from kvwatch.catalogue.metrics import METRICS, MetricKind, by_name
from kvwatch.model.level import Level, RuleId, Scope
from kvwatch.model.report import GpuReport, TickReport
from tests.exporters import sample

GPU = {"uuid", "gpu"}
SERVER = {"server", "engine"}
BOTH = GPU | SERVER

# Every metric of the public contract: its labels, and where a label has a closed set, its values.
CONTRACT: dict[str, tuple[set[str], dict[str, set[str]]]] = {
    "gpu_up": (GPU, {}),
    "gpu_state": (
        GPU | {"state"},
        {"state": {"ok", "lost", "reset_required", "denied", "missing", "unknown"}},
    ),
    "gpu_info": (GPU | {"name", "driver_version", "memory_accounting", "mig_profile", "parent_uuid"}, {}),
    "gpu_memory_total_bytes": (GPU, {}),
    "gpu_memory_used_bytes": (GPU, {}),
    "gpu_memory_free_bytes": (GPU, {}),
    "gpu_memory_reserved_bytes": (GPU, {}),
    "gpu_memory_used_peak_bytes": (GPU, {}),
    "gpu_memory_free_low_bytes": (GPU, {}),
    "gpu_sample_interval_seconds": (GPU, {}),
    "gpu_memory_ledger_bytes": (
        GPU | {"part"},
        {
            "part": {
                "weights",
                "kv_used",
                "kv_free",
                "engine_other",
                "other_process",
                "dead_process",
                "driver_reserved",
                "unattributed",
                "free",
            }
        },
    ),
    "gpu_utilization_ratio": (GPU, {}),
    "gpu_memory_bandwidth_utilization_ratio": (GPU, {}),
    "gpu_power_watts": (GPU, {}),
    "gpu_temperature_celsius": (GPU, {}),
    "gpu_xid_events_total": (GPU | {"xid"}, {}),
    "gpu_ecc_errors_total": (GPU | {"kind"}, {"kind": {"corrected", "uncorrected"}}),
    "server_up": (SERVER, {}),
    "server_stalled": (SERVER, {}),
    "server_info": (SERVER | {"kind", "version", "model"}, {}),
    "kv_usage_ratio": (SERVER, {}),
    "kv_capacity_tokens": (SERVER, {}),
    "kv_block_size_tokens": (SERVER, {}),
    "kv_blocks": (SERVER | {"state"}, {"state": {"used", "free", "evictable"}}),
    "kv_semantics_info": (SERVER | {"evictable", "basis"}, {}),
    "requests": (SERVER | {"state"}, {"state": {"running", "waiting"}}),
    "preemptions_total": (SERVER, {}),
    "recompute_tax_ratio": (SERVER, {}),
    "recomputed_tokens_ratio": (SERVER, {}),
    "ttft_seconds": (SERVER | {"quantile"}, {"quantile": {"0.5", "0.95", "0.99"}}),
    "tpot_seconds": (SERVER | {"quantile"}, {"quantile": {"0.5", "0.95", "0.99"}}),
    "queue_seconds": (SERVER | {"quantile"}, {"quantile": {"0.5", "0.95", "0.99"}}),
    "kv_block_waste_ratio": (SERVER | {"method"}, {}),
    "allocator_bytes": (
        SERVER | {"rank", "state"},
        {"state": {"allocated", "reserved", "active", "requested", "inactive"}},
    ),
    "allocator_fragmentation_ratio": (SERVER | {"rank", "kind"}, {"kind": {"soft", "hard", "total"}}),
    "allocator_largest_allocatable_bytes": (SERVER | {"rank"}, {}),
    "allocator_alloc_retries_total": (SERVER | {"rank"}, {}),
    "allocator_ooms_total": (SERVER | {"rank"}, {}),
    "time_to_exhaustion_seconds": (
        BOTH | {"resource", "bound"},
        {"resource": {"kv", "device"}, "bound": {"floor", "low", "central", "high"}},
    ),
    "forecast_coverage_ratio": (BOTH | {"resource"}, {"resource": {"kv", "device"}}),
    "rule_level": (BOTH | {"rule"}, {}),
    "rule_value": (BOTH | {"rule"}, {}),
    "rule_threshold": (BOTH | {"rule", "level"}, {"level": {"yellow", "red"}}),
    "rule_level_seconds_total": (
        BOTH | {"rule", "level"},
        {"level": {"unknown", "green", "yellow", "red"}},
    ),
    "limit_running": (SERVER, {}),
    "limit_configured": (SERVER, {}),
    "limit_active": (SERVER, {}),
    "lease_expiry_timestamp_seconds": (SERVER, {}),
    "actions_total": (
        {"action", "outcome"},
        {"outcome": {"applied", "noop", "refused", "timed_out", "failed", "skipped_recovered", "dry_run"}},
    ),
    "build_info": ({"version"}, {}),
    "control_mode": ({"mode"}, {"mode": {"observe", "advise", "act"}}),
    "maintenance_active": (set(), {}),
    "source_up": ({"source"}, {}),
    "source_stuck": ({"source"}, {}),
    "source_last_success_timestamp_seconds": ({"source"}, {}),
    "source_errors_total": ({"source"}, {}),
    "source_poll_seconds": ({"source"}, {}),
    "ticks_missed_total": (set(), {}),
    "config_last_reload_successful": (set(), {}),
    "config_last_reload_success_timestamp_seconds": (set(), {}),
}
# What is there although nothing is known: identities, states, kvwatch itself, counters that start at 0.
ALWAYS = {
    "gpu_up",
    "gpu_state",
    "gpu_info",
    "gpu_xid_events_total",
    "server_up",
    "rule_level",
    "rule_level_seconds_total",
    "limit_active",
    "build_info",
    "control_mode",
    "maintenance_active",
    "source_up",
    "source_stuck",
    "source_errors_total",
    "ticks_missed_total",
    "config_last_reload_successful",
    "headline_level",
    "last_tick_timestamp_seconds",
    "actions_dropped_total",
    "ledger_clamped_total",
}


def rows(report: TickReport, name: str) -> dict[tuple[str, ...], float]:
    """All samples of one metric, by label values."""
    return dict(by_name(f"kvwatch_{name}").read(report))


def labelled(report: TickReport, name: str) -> list[tuple[dict[str, str], float]]:
    """The same with label names."""
    spec = by_name(f"kvwatch_{name}")
    return [(dict(zip(spec.labels, values, strict=True)), value) for values, value in spec.read(report)]


@pytest.mark.parametrize("name", sorted(CONTRACT))
def test_every_contract_metric_is_there_with_its_labels(name: str) -> None:
    """Each metric of the contract has exactly the labels it promises, and data where data exists."""
    labels, values = CONTRACT[name]
    found = labelled(sample.report(), name)

    assert set(by_name(f"kvwatch_{name}").labels) == labels
    assert found
    for label, allowed in values.items():
        assert {row[label] for row, _ in found} == allowed


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_nothing_is_claimed_when_nothing_is_known(spec) -> None:
    """A report full of unknowns yields no series but identities, states and counters that start at 0."""
    found = list(spec.read(sample.empty_report()))

    assert bool(found) == (spec.name.removeprefix("kvwatch_") in ALWAYS)


def test_names_follow_the_conventions() -> None:
    """Names are unique, counters alone end in _total, infos in _info, and every help is one sentence."""
    names = [spec.name for spec in METRICS]

    assert len(set(names)) == len(names)
    for spec in METRICS:
        assert spec.name.startswith("kvwatch_")
        assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER)
        assert spec.name.endswith("_info") == (spec.kind is MetricKind.INFO)
        assert spec.help.endswith(".")
        assert spec.help.isprintable()
        assert "\\" not in spec.help
        assert len(set(spec.labels)) == len(spec.labels)
        if spec.unit:
            assert spec.name.removesuffix("_total").endswith(f"_{spec.unit}")


def test_label_values_are_text_and_no_series_is_repeated() -> None:
    """Every label value is a plain string, no series comes twice, and no value is NaN."""
    for spec in METRICS:
        seen = set()
        for values, value in spec.read(sample.report()):
            assert len(values) == len(spec.labels)
            assert all(type(v) is str for v in values), spec.name
            assert not math.isnan(value)
            assert values not in seen
            seen.add(values)


def test_state_sets_have_exactly_one_state() -> None:
    """Of gpu_state's rows of one GPU, and of control_mode, exactly one is 1."""
    report = sample.report()
    by_gpu: dict[str, float] = {}
    for labels, value in labelled(report, "gpu_state"):
        by_gpu[labels["uuid"]] = by_gpu.get(labels["uuid"], 0.0) + value

    assert set(by_gpu.values()) == {1.0}
    assert len(by_gpu) == len(report.gpus)
    assert sum(rows(report, "control_mode").values()) == 1.0


def test_never_filling_is_infinite_and_unknown_is_absent() -> None:
    """A forecast that does not fill says +Inf; one that knows nothing says nothing."""
    found = labelled(sample.report(), "time_to_exhaustion_seconds")
    cool = {r["bound"]: v for r, v in found if r["server"] == "chat" and r["engine"] == "1"}

    assert cool == {"floor": 900.0, "low": math.inf, "central": math.inf, "high": math.inf}
    assert not [r for r, _ in found if r["server"] == "embed"]
    assert all((r["server"] == "") == (r["resource"] == "device") for r, _ in found)


def test_scopes_that_fold_show_the_worst_level_and_never_green_over_unknown() -> None:
    """Two sources of the host share one source_stale series: red over yellow over unknown over green."""
    host = [Scope(source="nvml"), Scope(source="dcgm")]

    def level(*levels: Level) -> float:
        made = tuple(
            sample.verdict(RuleId.SOURCE_STALE, lv, sc, value=float(lv))
            for lv, sc in zip(levels, host, strict=True)
        )
        return rows(sample.report(verdicts=made), "rule_level")[("", "", "", "", "source_stale")]

    assert level(Level.GREEN, Level.YELLOW) == 1
    assert level(Level.RED, Level.YELLOW) == 2
    assert level(Level.UNKNOWN, Level.GREEN) == -1
    assert level(Level.GREEN, Level.UNKNOWN) == -1
    assert level(Level.UNKNOWN, Level.YELLOW) == 1


def test_folded_level_seconds_never_shrink() -> None:
    """When one of two folded scopes goes on counting, no level's seconds go down."""

    def seconds(*spent: tuple[float, float, float, float]) -> dict[tuple[str, ...], float]:
        made = tuple(
            sample.verdict(
                RuleId.SOURCE_STALE,
                Level.GREEN,
                Scope(source=str(i)),
                seconds_before=s,
                since_s=sample.NOW_MONO_S,
            )
            for i, s in enumerate(spent)
        )
        return rows(sample.report(verdicts=made), "rule_level_seconds_total")

    before = seconds((0.0, 10.0, 0.0, 2.0), (0.0, 12.0, 0.0, 0.0))
    after = seconds((0.0, 11.0, 0.0, 2.0), (0.0, 12.0, 0.0, 1.0))

    assert all(after[key] >= before[key] for key in before)
    assert before["", "", "", "", "source_stale", "red"] == 2.0
    assert before["", "", "", "", "source_stale", "green"] == 10.0


def test_server_series_always_carry_an_engine() -> None:
    """Facts about a server stand once per engine; a server of which none is known has engine "0"."""
    found = rows(sample.report(), "server_up")

    assert found == {("chat", "0"): 1.0, ("chat", "1"): 1.0, ("embed", "0"): 1.0, ("batch", "0"): 0.0}


def test_counters_that_can_be_waited_for_start_at_zero() -> None:
    """The Xids that the rules wait for, and every outcome of a known action, exist from the start."""
    report = sample.report()
    xids = {r["xid"]: v for r, v in labelled(report, "gpu_xid_events_total") if r["gpu"] == "1"}
    outcomes = {r["outcome"]: v for r, v in labelled(report, "actions_total") if r["action"] == "lease"}

    assert {"48", "63", "64", "74", "79", "94", "95", "119", "120"} <= set(xids)
    assert xids["31"] == 1
    assert xids["79"] == 0
    assert outcomes == {
        "applied": 12,
        "failed": 1,
        "noop": 0,
        "refused": 0,
        "timed_out": 0,
        "skipped_recovered": 0,
        "dry_run": 0,
    }


def test_a_device_without_events_claims_no_xid_count() -> None:
    """Where Xid events cannot be received, no zero pretends that there were none."""
    assert not [r for r, _ in labelled(sample.report(), "gpu_xid_events_total") if r["gpu"] == "5"]


def test_a_mig_parent_has_no_ledger() -> None:
    """A GPU that is split into instances has no ledger of its own, whatever the report says."""
    report = sample.report()
    parent = next(g for g in report.gpus if g.state.is_mig_parent)
    forced = dataclasses.replace(parent, signals=sample.gpu_signals(parent.state, "chat"))

    assert not rows(dataclasses.replace(report, gpus=(forced,)), "gpu_memory_ledger_bytes")


def test_case_A4_total_is_used_free_and_reserved() -> None:
    """used + free + reserved = total, and so does the ledger; where reserved is not told it is absent."""
    report = sample.report()
    total = rows(report, "gpu_memory_total_bytes")
    used, free, reserved = (rows(report, f"gpu_memory_{part}_bytes") for part in ("used", "free", "reserved"))
    ledger: dict[tuple[str, ...], float] = {}
    for (uuid, gpu, _part), size in rows(report, "gpu_memory_ledger_bytes").items():
        ledger[uuid, gpu] = ledger.get((uuid, gpu), 0) + size

    assert all(used[ids] + free[ids] + reserved[ids] == total[ids] for ids in reserved)
    assert all(size == total[ids] for ids, size in ledger.items())
    assert (sample.uuid(5), "5") in total
    assert (sample.uuid(5), "5") not in reserved


def test_case_D4_a_value_that_is_no_longer_told_has_a_metric_of_its_own() -> None:
    """What a source stops telling is named on the page, by itself, and a GPU that tells all has none."""
    texts = ("power", "memory (the page lacks DCGM_FI_DEV_FB_RESERVED)", "memory")
    state = dataclasses.replace(sample.gpu_state(7), capabilities_missing=texts)
    report = sample.report(
        gpus=(
            GpuReport(state=state, signals=None, up=True, age_s=0.0),
            GpuReport(state=sample.gpu_state(6), signals=None, up=True, age_s=0.0),
        )
    )

    assert rows(report, "gpu_capability_missing") == {
        (sample.uuid(7), "7", "memory"): 1.0,
        (sample.uuid(7), "7", "power"): 1.0,
    }


def test_xids_are_counted_from_zero_unless_events_cannot_be_had() -> None:
    """A driver without clock event reasons still reports Xids; one that refuses events, or MIG, does not."""
    texts = {0: "nvmlDeviceGetCurrentClocksEventReasons", 1: "nvmlDeviceRegisterEvents", 2: "xid events (x)"}
    gpus = [
        dataclasses.replace(sample.gpu_state(i), capabilities_missing=(text,), xid_events_total=())
        for i, text in texts.items()
    ]
    gpus.append(dataclasses.replace(sample.gpu_state(3), parent_uuid="GPU-p", xid_events_total=()))
    report = sample.report(
        gpus=tuple(GpuReport(state=state, signals=None, up=True, age_s=0.0) for state in gpus)
    )

    found = rows(report, "gpu_xid_events_total")
    assert {uuid for uuid, _, _ in found} == {sample.uuid(0)}
    assert set(found.values()) == {0}


def test_case_A7_bandwidth_activity_is_never_called_memory_usage() -> None:
    """The share of time in which memory is busy is called bandwidth, and its help says what it is not."""
    spec = by_name("kvwatch_gpu_memory_bandwidth_utilization_ratio")
    tight = dict(spec.read(sample.report()))[sample.uuid(0), "0"]

    assert tight == 0.41  # of a GPU that is 99 % full
    assert "how full" in spec.help
    assert not [s.name for s in METRICS if "memory_util" in s.name or "memory_usage" in s.name]


def test_case_A8_a_gpu_counts_once_however_many_servers_share_it() -> None:
    """Device series are keyed by UUID alone, so their sum is the host's memory, not a multiple of it."""
    shared = tuple(
        GpuReport(
            state=sample.gpu_state(i),
            signals=dataclasses.replace(
                sample.gpu_signals(sample.gpu_state(i), "chat"), servers=("chat", "embed", "batch")
            ),
            up=True,
            age_s=0.0,
        )
        for i in range(8)
    )
    report = sample.report(gpus=shared)

    assert sum(rows(report, "gpu_memory_total_bytes").values()) == 8 * sample.TOTAL
    assert sum(rows(report, "gpu_memory_ledger_bytes").values()) == 8 * sample.TOTAL
    assert not [s.name for s in METRICS if s.name.startswith("kvwatch_gpu") and "server" in s.labels]


def test_case_K2_kvwatch_itself_comes_first() -> None:
    """Self metrics stand in front of everything that depends on a source, and are there without any."""
    names = [spec.name for spec in METRICS]
    last_self = max(i for i, n in enumerate(names) if n.startswith(("kvwatch_source_", "kvwatch_build_")))
    first_other = min(i for i, n in enumerate(names) if n.startswith(("kvwatch_gpu_", "kvwatch_server_")))
    down = rows(sample.empty_report(), "source_up")

    assert last_self < first_other
    assert down == {("nvml",): 0.0}
