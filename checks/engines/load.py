"""Bounded load on an OpenAI-style completions server on loopback (standard library only).

`Load` runs this module as a process of its own: its clients must not share an interpreter with the
reader and the recorder, whose deadlines they would make late.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
REQUEST_DEADLINE_S = 90


class Load:
    """`total` requests from `concurrency` clients, ended after `seconds` at the latest.

    `body` goes into every request beside model, prompt and max_tokens. After `join`: what came of the
    requests, and the tokens that the server said it had generated for them.
    """

    def __init__(
        self,
        base: str,
        *,
        concurrency: int,
        total: int,
        prompt: int = 60,
        generate: int = 200,
        seconds: float = 90,
        body: Mapping[str, object] | None = None,
    ) -> None:
        if not base.startswith("http://127.0.0.1:"):
            raise ValueError("load goes to loopback only")
        self.outcomes: Counter[str] = Counter()
        self.generated = 0
        numbers = (concurrency, total, prompt, generate, seconds)
        extra = json.dumps({"ignore_eos": True} if body is None else dict(body))
        self._command = [sys.executable, "-m", "checks.engines.load", base, *map(str, numbers), extra]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Load:
        """Begin; returns itself."""
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def stop(self) -> None:
        """Send no further request; those under way are waited for."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.stdin = None

    def join(self, seconds: float) -> None:
        """Wait for the clients, and count what came of their requests; past `seconds` they are ended.

        Without `stop` before it, for all the requests.
        """
        if self._process is None or self._process.returncode is not None:
            return
        try:
            self._process.wait(seconds)  # what it says fits into the pipe
            said, _ = self._process.communicate()
            told = json.loads(said)
            self.outcomes.update(told["outcomes"])
            self.generated = told["generated"]
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate(timeout=5)


class Clients:
    """The threads of the load's own process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.outcomes: Counter[str] = Counter()
        self.generated = 0
        self._args = args
        self._left = args.total
        self._end_s = time.monotonic() + args.seconds
        self._lock = threading.Lock()

    def run(self) -> None:
        """Until all is sent, the time is over or the starter has closed our standard input."""
        threads = [threading.Thread(target=self._client, daemon=True) for _ in range(self._args.concurrency)]
        threading.Thread(target=self._watch_input, daemon=True).start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _watch_input(self) -> None:
        sys.stdin.read()
        self._end_s = 0.0

    def _client(self) -> None:
        while time.monotonic() < self._end_s:
            with self._lock:
                if self._left <= 0:
                    return
                self._left -= 1
                number = self._left
            outcome, generated = self._request(number)
            with self._lock:
                self.outcomes[outcome] += 1
                self.generated += generated

    def _request(self, number: int) -> tuple[str, int]:
        text = "".join(random.Random(number).choices(string.ascii_lowercase, k=self._args.prompt))
        body = {"model": "tiny", "prompt": text, "max_tokens": self._args.generate, **self._args.body}
        request = urllib.request.Request(
            f"{self._args.base}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_DEADLINE_S) as reply:
                answer = json.loads(reply.read())
                return str(reply.status), int(answer["usage"]["completion_tokens"])
        except urllib.error.HTTPError as error:
            error.close()
            return str(error.code), 0
        except OSError as error:
            return type(error).__name__, 0


def main() -> None:
    """Run the clients and print what came of their requests, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    for name in ("concurrency", "total", "prompt", "generate"):
        parser.add_argument(name, type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("body", type=json.loads)
    clients = Clients(parser.parse_args())
    clients.run()
    print(json.dumps({"outcomes": clients.outcomes, "generated": clients.generated}))


if __name__ == "__main__":
    main()
