"""A really running SGLang on the CPU, and what kvwatch must show of its answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from checks.engines.server import ENGINES, Server, free_port
from tests.harness import Page

LOADS, METRICS = "/v1/loads", "/metrics"
RUNNING_MAX = 32
SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
# kvwatch's name and labels, and the key of the server's own figure in /v1/loads.
SAME = (
    ("kvwatch_kv_usage_ratio", {}, "token_usage"),
    ("kvwatch_kv_capacity_tokens", {}, "max_total_num_tokens"),
    ("kvwatch_requests", {"state": "running"}, "num_running_reqs"),
    ("kvwatch_requests", {"state": "waiting"}, "num_waiting_reqs"),
)


STAND_IN = """def rotary_embedding(*_):
    raise NotImplementedError
"""


class Sglang(Server):
    """A pool of 2048 tokens, at most 32 requests at once; the schedule is set so that it retracts."""

    computing = (b"sglang::scheduler",)

    def __init__(self, log: Path, *arguments: str, metrics: bool = True) -> None:
        port = free_port()
        command = [
            str(ENGINES / "sglang/bin/python"), "-m", "sglang.launch_server",
            "--model-path", str(ENGINES / "tiny-llama"), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(port),
            "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--dtype", "float32", "--max-total-tokens", "2048", "--context-length", "1024",
            "--max-running-requests", str(RUNNING_MAX), "--schedule-conservativeness", "0.01",
            "--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup",
            *(["--enable-metrics"] if metrics else []),
            *arguments,
        ]  # fmt: skip
        # Without a GPU it imports one function of vLLM's, which it then does not call.
        stand_in = log.parent / "stand-in" / "vllm"
        stand_in.mkdir(parents=True, exist_ok=True)
        (stand_in / "__init__.py").touch()
        (stand_in / "_custom_ops.py").write_text(STAND_IN)
        super().__init__(log, command, SETTINGS | {"PYTHONPATH": str(stand_in.parent)}, port)


def retracted(page: str) -> float:
    """The counter of retracted requests; it appears at the first one."""
    own = Page(page).all("sglang:num_retracted_requests_total")
    return sum(value for _, value in own)


def assert_same(page: Page, theirs: Mapping[str, str]) -> None:
    """Every figure of every rank is the server's own."""
    loads = json.loads(theirs[LOADS])["loads"]
    assert loads
    for load in loads:
        engine = str(load["dp_rank"])
        for name, labels, key in SAME:
            seen = page.get(name, server="chat", engine=engine, **labels)
            assert seen == load[key], f"{name}{labels} of engine {engine}"
    if METRICS in theirs:
        assert page.get("kvwatch_preemptions_total", server="chat") == retracted(theirs[METRICS])
