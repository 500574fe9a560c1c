"""A really running Dynamo: its front end, and a worker that is its mocker or vLLM on the CPU."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from checks.engines import vllm
from checks.engines.server import ENGINES, Server, free_port
from tests.harness import Page

METRICS = "/metrics"
RUNNING_MAX = 8
LAUNCHER = Path(__file__).with_name("dynamo_vllm.py")


def environment(folder: Path) -> dict[str, str]:
    """Dynamo's packages beside those of vLLM; found by files in `folder`, not by etcd; on loopback."""
    local = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")
    return vllm.SETTINGS | {
        "PYTHONPATH": str(ENGINES / "dynamo"),
        "PYTHONHASHSEED": "0",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "discovery"),
        "HF_HOME": str(folder / "hub"),
        **dict.fromkeys(local, "127.0.0.1"),
    }


def model(folder: Path) -> Path:
    """The toy model with a chat template, without which the front end takes no model."""
    copy = folder / "model"
    if not copy.exists():
        shutil.copytree(ENGINES / "tiny-llama", copy)
        settings = copy / "tokenizer_config.json"
        template = {"chat_template": "{% for one in messages %}{{ one['content'] }}{% endfor %}"}
        settings.write_text(json.dumps(json.loads(settings.read_text()) | template))
    return copy


def low_port() -> int:
    """A port that was free a moment ago; Dynamo 1.6.1 takes none above 32767 for DYN_SYSTEM_PORT."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port below 32000")


class Worker(Server):
    """One worker; its pages are on its system port, requests reach it through the front end only."""

    ready = METRICS  # its /health says "notready" for ever where the engine has no health check
    computing = (b"EngineCore", b"VLLM::Worker")

    def __init__(self, folder: Path, *arguments: str) -> None:
        port = low_port()
        command = [str(ENGINES / "vllm/bin/python"), *arguments]
        settings = environment(folder) | {"DYN_SYSTEM_PORT": str(port)}
        super().__init__(folder / "worker.log", command, settings, port)


def mocker(folder: Path, *arguments: str) -> Worker:
    """64 blocks of 16 tokens, at most 8 requests at once; it computes nothing and takes its time for it."""
    return Worker(
        folder, "-m", "dynamo.mocker", "--model-path", str(model(folder)), "--model-name", "tiny",
        "--num-gpu-blocks-override", "64", "--block-size", "16", "--max-num-seqs", str(RUNNING_MAX),
        "--max-num-batched-tokens", "512", *arguments,
    )  # fmt: skip


def vllm_worker(folder: Path) -> Worker:
    """33 blocks of 32 tokens (one is vLLM's null block), at most 16 requests at once."""
    return Worker(
        folder, "-P", str(LAUNCHER), "--model", str(model(folder)), "--served-model-name", "tiny",
        "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager",
        "--block-size", "32", "--num-gpu-blocks-override", "33",
    )  # fmt: skip


class Frontend(Server):
    """The front end; it serves "tiny" once a worker has registered it."""

    ready = METRICS

    def __init__(self, folder: Path, **more: str) -> None:
        port = free_port()
        command = [
            str(ENGINES / "vllm/bin/python"), "-m", "dynamo.frontend",
            "--http-host", "127.0.0.1", "--http-port", str(port),
        ]  # fmt: skip
        (folder / "discovery").mkdir(exist_ok=True)
        super().__init__(folder / "frontend.log", command, environment(folder) | more, port)

    def serves(self) -> bool:
        """Whether it has found a worker for the model."""
        return any(one["id"] == "tiny" for one in json.loads(self.get("/v1/models"))["data"])


def assert_same_queue(page: Page, theirs: Mapping[str, str]) -> None:
    """Running and waiting are the front end's own figures; before the first request both are 0."""
    own = Page(theirs[METRICS])
    inflight = own.get("dynamo_frontend_inflight_requests", model="tiny") or 0
    queued = own.get("dynamo_frontend_queued_requests", model="tiny") or 0
    assert page.get("kvwatch_requests", server="chat", engine="0", state="running") == inflight - queued
    assert page.get("kvwatch_requests", server="chat", engine="0", state="waiting") == queued
