"""A vLLM `/metrics` page over real HTTP whose figures a test moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LABELS = 'engine="0",model_name="m"'


class PageServer:
    """Set `usage`, `running`, `waiting`; counters move by themselves. `broken` answers 500.

    `on_page` is called with the moment a page's last byte has been handed to the kernel, and the page.
    """

    def __init__(self, port: int = 0) -> None:
        self.usage, self.running, self.waiting = 0.5, 10, 0
        self.preemptions = 0
        self.broken = False
        self.pages = 0
        self.epoch = 1.0e9
        self.on_page: Callable[[float, bytes], None] = lambda _at_s, _page: None
        self._tokens = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                body = owner.page().encode() if self.path == "/metrics" else b"{}"
                self.send_response(500 if owner.broken else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                if self.path == "/metrics":
                    owner.on_page(time.monotonic(), body)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_: object) -> None:
                """A client that was killed is no news."""

        self._server = Server(("127.0.0.1", port), Handler)
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def page(self) -> str:
        """The page as it is now."""
        self.pages += 1
        self._tokens += 100
        rows = [
            ("vllm:num_requests_running", "gauge", self.running),
            ("vllm:num_requests_waiting", "gauge", self.waiting),
            ("vllm:kv_cache_usage_perc", "gauge", self.usage),
            ("vllm:num_preemptions_total", "counter", self.preemptions),
            ("vllm:prompt_tokens_total", "counter", self._tokens),
            ("vllm:generation_tokens_total", "counter", self._tokens),
        ]
        lines = []
        for name, kind, value in rows:
            lines += [f"# TYPE {name} {kind}", f"{name}{{{LABELS}}} {float(value)}"]
        lines.append("# TYPE vllm:cache_config_info gauge")
        lines.append('vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0')
        lines.append("# TYPE process_start_time_seconds gauge")
        lines.append(f"process_start_time_seconds {self.epoch}")
        return "\n".join(lines) + "\n"

    def restart(self) -> None:
        """The engine starts again: its counters begin anew."""
        self._tokens, self.preemptions = 0, 0
        self.epoch += 100

    def full(self, running: int = 40, waiting: int = 8) -> None:
        """A pool that is full, with a queue."""
        self.running, self.waiting = running, waiting
        self.usage = 0.99

    def calm(self, running: int = 10) -> None:
        """Room for everybody."""
        self.usage, self.running, self.waiting = 0.5, running, 0

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
