"""A really running vLLM on the CPU: start, control, end (only processes started here)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ENGINES = Path(os.environ.get("KVWATCH_ENGINES_DIR", ROOT / "engines-work"))
START_DEADLINE_S = 240


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Vllm:
    """33 blocks of 32 tokens (one is vLLM's null block), at most 16 requests at once."""

    def __init__(
        self, log: Path, *arguments: str, port: int | None = None, environment: dict[str, str] | None = None
    ) -> None:
        self.port = port or free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self._log = log
        command = [
            str(ENGINES / "vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(ENGINES / "tiny-llama"), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32", "--max-model-len", "512",
            "--max-num-seqs", "16", "--enforce-eager",
            "--block-size", "32", "--num-gpu-blocks-override", "33",
            *arguments,
        ]  # fmt: skip
        settings = {
            "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1",
            # One core for the engine: with all of them it starves its own front end, whose page it is about.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                command,
                env=os.environ | settings | (environment or {}),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> Vllm:
        """Until it answers; raises with the end of its log when it does not."""
        end_s = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < end_s:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.base}/health", timeout=2):
                    self._give_way()
                    return self
            except OSError:
                time.sleep(0.3)
        tail = self._log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"vLLM did not start:\n{tail}")

    def _give_way(self) -> None:
        """Lower the engine's priority: core and worker spin on their queue, and on two cores that starves
        the front end, whose page this is about."""
        for pid in descendants(self.process.pid):
            title = _command(pid)
            if b"EngineCore" in title or b"Worker" in title:
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), 15)

    def post(self, path: str) -> None:
        """One POST without a body (the development-mode controls)."""
        request = urllib.request.Request(self.base + path, b"", method="POST")
        with urllib.request.urlopen(request, timeout=30) as reply:
            reply.read()

    def engine_pids(self) -> list[int]:
        """Processes of this server whose title is that of an engine core."""
        return [pid for pid in descendants(self.process.pid) if b"EngineCore" in _command(pid)]

    def kill(self) -> None:
        """SIGKILL to the server and every process it started."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(20)

    def stop(self) -> None:
        """The gentle way, then the other."""
        if self.process.poll() is None:
            for pid in self.engine_pids():
                os.kill(pid, signal.SIGCONT)
            children = descendants(self.process.pid)
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
            for pid in children:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def _command(pid: int) -> bytes:
    """A process's command line or title; nothing once it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def descendants(root: int) -> list[int]:
    """Every process below `root`, by parent pid."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "stat").read_text()
            except OSError:
                continue
            parents[int(folder.name)] = int(text.rpartition(")")[2].split()[1])
    below: list[int] = []
    wave = [root]
    while wave:
        wave = [pid for pid, parent in parents.items() if parent in wave]
        below += wave
    return below
