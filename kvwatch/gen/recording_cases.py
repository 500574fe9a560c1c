"""How are recording rules shown to work? Series in, samples expected, for two hosts that differ."""

from __future__ import annotations

from collections.abc import Mapping

from kvwatch.gen.promtool import HOST, STEP_S, Case, metric_series, series
from kvwatch.model.settings import GIB

OTHER = {**HOST, "instance": "gpu-host-2:9843"}
PARENT = {"uuid": "GPU-1", "gpu": "1"}
SLICES = ({"uuid": "MIG-1", "gpu": "1"}, {"uuid": "MIG-2", "gpu": "1"})

Input = list[dict[str, str]]


def _sample(name: str, labels: Mapping[str, str], value: float | str) -> Case:
    return {"labels": series(name, labels, "")["series"], "value": value}


def _case(title: str, inputs: Input, name: str, *samples: tuple[Mapping[str, str], float]) -> Case:
    expected = [_sample(name, labels, value) for labels, value in samples]
    return {
        "name": title,
        "interval": f"{STEP_S}s",
        "input_series": inputs,
        "promql_expr_test": [{"expr": name, "eval_time": "2m", "exp_samples": expected}],
    }


def _level(labels: Mapping[str, str], rule: str, level: int) -> dict[str, str]:
    return metric_series("rule_level", {**labels, "rule": rule}, f"{level}x20")


def _levels() -> list[Case]:
    chat, code = ({**HOST, "server": name, "engine": "0"} for name in ("chat", "code"))
    gpu = {**OTHER, "uuid": "GPU-0", "gpu": "0"}
    inputs = [
        _level(chat, "recompute_tax", 2), _level(chat, "latency_slo", -1), _level(chat, "kv_usage", 2),
        _level(code, "latency_slo", 0), _level(code, "kv_block_waste", 1), _level(code, "recompute_tax", -1),
        _level({**OTHER, "server": "chat", "engine": "0"}, "recompute_tax", -1),
        _level(gpu, "gpu_lost", 2), _level({**gpu, "uuid": "GPU-1", "gpu": "1"}, "gpu_lost", 2),
    ]  # fmt: skip
    job = {"job": HOST["job"]}
    return [
        _case(
            "The worst level per server counts rules that page; unknown only where none can be judged",
            inputs,
            "instance_server:kvwatch_rule_level:max",
            ({**HOST, "server": "chat"}, 2),
            ({**HOST, "server": "code"}, 0),
            ({**OTHER, "server": "chat"}, -1),
        ),
        _case(
            "How much is red counts scopes of all hosts, of rules that page",
            inputs,
            "job_rule:kvwatch_rule_level_red:sum",
            ({**job, "rule": "gpu_lost"}, 2),
            ({**job, "rule": "latency_slo"}, 0),
            ({**job, "rule": "recompute_tax"}, 1),
        ),
        _case(
            "The headline per host is the host's own",
            [metric_series("headline_level", HOST, "-1x20"), metric_series("headline_level", OTHER, "2x20")],
            "instance:kvwatch_headline_level:max",
            (HOST, -1),
            (OTHER, 2),
        ),
    ]


def _memory() -> list[Case]:
    def free(labels: Mapping[str, str], gib: int) -> dict[str, str]:
        return metric_series("gpu_memory_free_bytes", labels, f"{gib * GIB}x20")

    def facts(labels: Mapping[str, str], parent: str) -> dict[str, str]:
        said = {"name": "NVIDIA H200", "mig_profile": "3g.71gb", "parent_uuid": parent}
        return metric_series("gpu_info", {**labels, **said}, "1x20")

    inputs = [
        free({**HOST, "uuid": "GPU-0", "gpu": "0"}, 40),
        free({**HOST, **PARENT}, 1),
        *(free({**HOST, **piece}, 20) for piece in SLICES),
        *(facts({**HOST, **piece}, PARENT["uuid"]) for piece in SLICES),
        free({**OTHER, **PARENT}, 7),
    ]
    return [
        _case(
            "Free memory of a host counts the instances of a split GPU and not the GPU as well",
            inputs,
            "instance:kvwatch_gpu_memory_free_bytes:sum",
            (HOST, 80 * GIB),
            (OTHER, 7 * GIB),
        ),
        _case(
            "The least free memory of a host is that of its fullest GPU or instance",
            inputs,
            "instance:kvwatch_gpu_memory_free_bytes:min",
            (HOST, 20 * GIB),
            (OTHER, 7 * GIB),
        ),
    ]


def _rest() -> list[Case]:
    gpu = {**HOST, "uuid": "GPU-0", "gpu": "0", "resource": "device"}
    server = {**HOST, "server": "chat", "engine": "0"}

    def until(labels: Mapping[str, str], bound: str, seconds: str) -> dict[str, str]:
        return metric_series("time_to_exhaustion_seconds", {**labels, "bound": bound}, f"{seconds}x20")

    def requests(engine: str, state: str, count: int) -> dict[str, str]:
        return metric_series("requests", {**server, "engine": engine, "state": state}, f"{count}x20")

    soonest = "instance_resource:kvwatch_time_to_exhaustion_seconds:min"
    return [
        _case(
            "The nearest exhaustion takes the central forecast of the worst GPU, apart from the KV pool's",
            [
                until(gpu, "central", "600"),
                until(gpu, "low", "60"),
                until({**gpu, "uuid": "GPU-1", "gpu": "1"}, "central", "300"),
                until({**server, "resource": "kv"}, "central", "20"),
            ],
            soonest,
            ({**HOST, "resource": "device"}, 300),
            ({**HOST, "resource": "kv"}, 20),
        ),
        _case(
            "Requests of a host are those of all its engines, running and waiting apart",
            [requests("0", "running", 4), requests("1", "running", 3), requests("0", "waiting", 2)],
            "instance_state:kvwatch_requests:sum",
            ({**HOST, "state": "running"}, 7),
            ({**HOST, "state": "waiting"}, 2),
        ),
    ]


def cases() -> list[Case]:
    """Every recording rule, at least once."""
    return [*_levels(), *_memory(), *_rest()]
