"""A socket that starts the helper for each connection, as systemd does for kvwatch-exec.socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

from tests.harness import ROOT

CONFIG = "KVWATCH_TEST_HOOKS"  # where tests write which programs are named


class Inetd:
    """Listens on `socket`; `said()` is what the helpers wrote on standard error."""

    def __init__(self, folder: Path, *, user: str = "root", config: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.socket = folder / "exec.sock"
        self.config = config or folder / "hooks.yml"
        self.state = folder / "state"
        self.state.mkdir(exist_ok=True)
        self._log = folder / "helper.log"
        self._command = [sys.executable, "-m", "kvwatch.exec_helper", "--user", user]
        self._command += ["--config", str(self.config), "--state", str(self.state)]
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.socket))
        self._listener.listen(16)
        self.socket.chmod(0o666)
        self._workers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                channel, _ = self._listener.accept()
                worker = threading.Thread(target=self._serve, args=(channel,), daemon=True)
                self._workers.append(worker)
                worker.start()

    def _serve(self, channel: socket.socket) -> None:
        with channel, self._log.open("ab") as log:
            process = subprocess.Popen(
                self._command, cwd=ROOT, stdin=channel, stdout=log, stderr=log, env=os.environ
            )
        process.wait()

    def said(self) -> str:
        """What the helpers wrote so far; those that have answered may be about to."""
        for worker in self._workers:
            worker.join(10)
        return self._log.read_text() if self._log.exists() else ""

    def noted(self) -> int:
        """How many levers are noted for giving back."""
        return len(list(self.state.iterdir()))

    def __enter__(self) -> Inetd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for worker in self._workers:
            worker.join(10)


def name(config: Path, *programs: list[str]) -> None:
    """Write a configuration that names these programs. JSON is YAML."""
    notices = [{"on": ["red"], "exec": {"argv": argv}} for argv in programs]
    config.write_text(json.dumps({"notify": notices}))


def allow(argv: list[str]) -> None:
    """Name a program in the configuration of the helper in use, if one is."""
    config = os.environ.get(CONFIG)
    if config:
        name(Path(config), argv)
