"""Bounded load on an OpenAI-style completions server on loopback (standard library only)."""

from __future__ import annotations

import json
import random
import string
import threading
import time
import urllib.error
import urllib.request
from collections import Counter


class Load:
    """`total` requests from `concurrency` clients, ended after `seconds` at the latest."""

    def __init__(
        self,
        base: str,
        *,
        concurrency: int,
        total: int,
        prompt: int = 60,
        generate: int = 200,
        seconds: float = 90,
    ) -> None:
        if not base.startswith("http://127.0.0.1:"):
            raise ValueError("load goes to loopback only")
        self.outcomes: Counter[str] = Counter()
        self._base, self._prompt, self._generate = base, prompt, generate
        self._left = total
        self._end_s = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(concurrency)]

    def start(self) -> Load:
        """Begin; returns itself."""
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Send no further request."""
        self._end_s = 0.0

    def join(self, seconds: float) -> None:
        """Wait for the clients."""
        for thread in self._threads:
            thread.join(seconds)

    def _client(self) -> None:
        while time.monotonic() < self._end_s:
            with self._lock:
                if self._left <= 0:
                    return
                self._left -= 1
                number = self._left
            outcome = self._request(number)
            with self._lock:
                self.outcomes[outcome] += 1

    def _request(self, number: int) -> str:
        text = "".join(random.Random(number).choices(string.ascii_lowercase, k=self._prompt))
        body = {"model": "tiny", "prompt": text, "max_tokens": self._generate, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self._base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=90) as reply:
                reply.read()
                return str(reply.status)
        except urllib.error.HTTPError as error:
            error.close()
            return str(error.code)
        except OSError as error:
            return type(error).__name__
