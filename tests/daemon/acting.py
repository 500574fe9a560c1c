"""Configurations and levers for tests that run the real daemon in act."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

CONFIG = """
tick: 200ms
gpus: {{source: none}}
servers:
  - {{name: chat, kind: vllm, url: "{url}", period: {period}, timeout: 150ms}}
notify: {notify}
control:
  mode: {mode}
  targets:
    - server: chat
      policy: threshold
      accept_goodput_loss: true
      floor: 4
      ceiling: 64
      lease: {lease}
      cooldown: {cooldown}
      via: {via}
"""


def config(url: str, via: str, **changes: str) -> str:
    values = {"mode": "act", "lease": "6s", "cooldown": "1s", "period": "200ms", "notify": "[]"} | changes
    return CONFIG.format(url=url, via=via, **values)


def exec_lever(folder: Path, body: str = "") -> tuple[Path, str]:
    """A hook that keeps its limit in a file, and the `via` that names it."""
    lever = folder / "lever"
    script = folder / "set-limit"
    script.write_text(
        f"""#!/bin/sh
{body}
if [ "$KVWATCH_EVENT" = restore ]; then rm -f {lever}; exit 0; fi
echo "$KVWATCH_MAX_RUNNING" > {lever}.new && mv {lever}.new {lever}
"""
    )
    script.chmod(0o755)
    return lever, f"[{{exec: {{argv: [{script}], deadline: 2s}}}}]"


class HttpLever:
    """A web hook that keeps its limit in memory, whatever becomes of the daemon."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.seen: list[dict[str, object]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.seen.append(told)
                owner.limit = told.get("max_running") if told["event"] == "limit" else None
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_: object) -> None:
                """A client that was killed is no news."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.via = f"[{{http: {{url: 'http://127.0.0.1:{self._server.server_address[1]}/', deadline: 2s}}}}]"
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __enter__(self) -> HttpLever:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
