"""A really running vLLM on the CPU, and what kvwatch must show of its page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from checks.engines.server import ENGINES, ROOT, Server, command_of, descendants, free_port
from tests.harness import Page

__all__ = ["ENGINES", "ROOT", "Vllm", "VllmServe", "assert_same", "descendants", "free_port"]

# kvwatch's name and labels, and the server's own series that it must equal.
SAME = (
    ("kvwatch_kv_usage_ratio", {}, "vllm:kv_cache_usage_perc"),
    ("kvwatch_requests", {"state": "running"}, "vllm:num_requests_running"),
    ("kvwatch_requests", {"state": "waiting"}, "vllm:num_requests_waiting"),
    ("kvwatch_preemptions_total", {}, "vllm:num_preemptions_total"),
)
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1",
    # One core for the engine: with all of them it starves its own front end, whose page it is about.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
}  # fmt: skip


class Vllm(Server):
    """33 blocks of 32 tokens (one is vLLM's null block), at most 16 requests at once."""

    computing = (b"EngineCore", b"Worker")
    launch: tuple[str, ...] = ("-m", "vllm.entrypoints.openai.api_server", "--model")

    def __init__(
        self, log: Path, *arguments: str, port: int | None = None, environment: dict[str, str] | None = None
    ) -> None:
        port = port or free_port()
        command = [
            str(ENGINES / "vllm/bin/python"), *self.launch, str(ENGINES / "tiny-llama"),
            "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "float32", "--max-model-len", "512",
            "--max-num-seqs", "16", "--enforce-eager",
            "--block-size", "32", "--num-gpu-blocks-override", "33",
            *arguments,
        ]  # fmt: skip
        super().__init__(log, command, SETTINGS | (environment or {}), port)

    def engine_pids(self) -> list[int]:
        """Processes of this server whose title is that of an engine core."""
        return [pid for pid in self.computing_pids() if b"EngineCore" in command_of(pid)]


class VllmServe(Vllm):
    """Started as `vllm serve`, the only way that knows `--api-server-count`.

    The command asks for the version of an installed "vllm", which the build for CPUs is not called: a folder
    beside the log stands in for its metadata.
    """

    launch = ("-c", "from vllm.entrypoints.cli.main import main; main()", "serve")

    def __init__(self, log: Path, *arguments: str) -> None:
        alias = log.parent / "alias" / "vllm-0.32.0.dist-info"
        alias.mkdir(parents=True, exist_ok=True)
        (alias / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        super().__init__(log, *arguments, environment={"PYTHONPATH": str(alias.parent)})


def samples(page: str) -> dict[tuple[str, str], float]:
    """vLLM's own series by name and engine."""
    return {
        (sample.name, sample.labels.get("engine", "0")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }


def assert_same(page: Page, theirs: Mapping[str, str]) -> None:
    """Every figure of every engine is the server's own."""
    own = samples(theirs["/metrics"])
    engines = {engine for name, engine in own if name == "vllm:num_requests_running"}
    assert engines
    for engine in engines:
        for name, labels, their_name in SAME:
            seen = page.get(name, server="chat", engine=engine, **labels)
            assert seen == own[their_name, engine], f"{name}{labels} of engine {engine}"
