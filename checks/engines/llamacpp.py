"""A really running llama-server, and what kvwatch must show of its answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from checks.engines.server import ENGINES, Server, free_port
from tests.harness import Page

SLOTS, METRICS, PROPS = "/slots", "/metrics", "/props"
CONTEXT = 2048


class Llamacpp(Server):
    """Four slots and 2048 tokens of KV cache in all; endpoints and the kind of pool as the arguments say."""

    def __init__(self, log: Path, *arguments: str) -> None:
        port = free_port()
        command = [
            str(ENGINES / "llama-server"), "-m", str(ENGINES / "tiny.gguf"), "--host", "127.0.0.1",
            "--port", str(port), "-np", "4", "-c", str(CONTEXT), "-t", "1", "-tb", "1", *arguments,
        ]  # fmt: skip
        super().__init__(log, command, None, port)

    def computing_threads(self) -> Iterable[int]:
        """The main thread decodes; those of the web server keep their priority."""
        return (self.process.pid,)


def held(slots: list[dict[str, object]]) -> int:
    """Tokens in all slots."""
    return sum(int(str(slot.get("n_prompt_tokens", 0))) for slot in slots)


def assert_same(page: Page, theirs: Mapping[str, str], *, unified: bool) -> None:
    """Slots and queue are the server's own."""
    slots = json.loads(theirs[SLOTS])
    running = sum(slot["is_processing"] for slot in slots)
    assert page.get("kvwatch_requests", server="chat", state="running") == running
    assert {slot["n_ctx"] for slot in slots} == {CONTEXT if unified else CONTEXT / 4}
    assert page.get("kvwatch_kv_capacity_tokens", server="chat") == CONTEXT
    assert page.get("kvwatch_kv_usage_ratio", server="chat") == min(1.0, held(slots) / CONTEXT)
    if METRICS in theirs:
        assert_queue(page, theirs)


def assert_queue(page: Page, theirs: Mapping[str, str]) -> None:
    """The queue is the server's own."""
    deferred = Page(theirs[METRICS]).get("llamacpp:requests_deferred")
    assert page.get("kvwatch_requests", server="chat", state="waiting") == deferred


def assert_page_alone(page: Page, theirs: Mapping[str, str]) -> None:
    """Without slots: requests as the metrics page tells them."""
    processing = Page(theirs[METRICS]).get("llamacpp:requests_processing")
    assert page.get("kvwatch_requests", server="chat", state="running") == processing
    assert_queue(page, theirs)
