"""transformers' continuous batching on the CPU under a lease; prints one JSON object for its test.

The waste that the agent tells is compared with the one counted from the manager's own block tables.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

try:
    from transformers.generation import ContinuousBatchingConfig
except ImportError:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

import kvwatch.agent.transformers as agent_module
from kvwatch import wire
from kvwatch.sources import agents

ENGINES = Path(os.environ.get("KVWATCH_ENGINES_DIR", Path(__file__).parent.parent.parent / "engines-work"))
QUEUE = 24  # requests that are kept waiting or running, however fast this machine is
PAGE = 32


def manager() -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        str(ENGINES / "tiny-llama"), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    generation = GenerationConfig(max_new_tokens=120, do_sample=False, eos_token_id=-1, pad_token_id=0)
    options: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 256, "use_cuda_graph": False}
    try:
        config = ContinuousBatchingConfig(page_size=PAGE, max_requests_per_batch=8, **options)
    except TypeError:  # before 5.17
        config = ContinuousBatchingConfig(block_size=PAGE, **options)
    return model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)


def counted(processor: Any) -> list[int]:
    """Tokens and slots of the active requests, from the manager's own tables."""
    cache = processor.cache
    groups = getattr(cache, "group_cache_managers", None) or list(cache.cache_allocators.values())
    active = processor.scheduler.active_requests
    table = groups[0].block_table
    tokens = sum(one.current_len() for name, one in active.items() if table.get(name))
    return [tokens, sum(len(table[name]) for name in active if table.get(name))]


class Run:
    """The manager under load, seen by its agent and by the check at the top of the same step."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "limits").mkdir()
        os.environ["KVWATCH_RUNTIME"] = str(self.folder)
        self.listening = agents.create(self.folder / "agent.sock")
        self.manager = manager()
        assert agent_module.attach(self.manager, "cb")
        assert not agent_module.attach(self.manager, "cb")
        self.pairs: list[list[list[int]]] = []
        self.seq = 0
        note = agent_module.ManagerAgent._note

        def noted(agent: Any, processor: Any) -> Any:
            state = note(agent, processor)
            self.pairs.append([[state["kv"]["tokens"], state["kv"]["blocks_held"]], counted(processor)])
            return state

        agent_module.ManagerAgent._note = noted  # type: ignore[method-assign]
        self.manager.start()
        self.added = self.done = self.failed = 0

    @property
    def open(self) -> int:
        """Requests that have not come back."""
        return self.added - self.done - self.failed

    def feed(self) -> None:
        """Keep the queue this long."""
        while self.open < QUEUE:
            prompt = [3 + (self.added * 7 + place) % 250 for place in range(60)]
            self.manager.add_request(prompt, max_new_tokens=120)
            self.added += 1

    def lease(self, **limit: Any) -> None:
        self.seq = wire.next_seq(self.seq)
        wire.write(
            self.folder / "limits",
            wire.Lease(server="cb", boot_id=wire.boot_id(), seq=self.seq, ttl_s=60, **limit),
        )

    def watch(self, seconds: float, *, until: int | None = None, feed: bool = True) -> list[int]:
        """Active requests, as they are seen from outside, for so long or until so many."""
        seen, end_s = [], time.monotonic() + seconds
        while time.monotonic() < end_s:
            if feed:
                self.feed()
            elif not self.open:
                break
            result = self.manager.get_result(timeout=0.02)
            if result is not None and result.is_finished():
                self.done += result.error is None
                self.failed += result.error is not None
            processor = self.manager.batch_processor
            if processor is not None:
                seen.append(len(processor.scheduler.active_requests))
                if until is not None and seen[-1] <= until:
                    break
        return seen


def main() -> int:
    run = Run()
    found: dict[str, Any] = {"version": transformers.__version__, "free": max(run.watch(3), default=0)}
    run.lease(max_running=2)
    run.watch(30, until=2)
    found["limited"] = max(run.watch(2), default=0)
    run.lease(admit=False)
    run.watch(30, until=0)
    time.sleep(0.3)
    found["closed"] = max(run.watch(1), default=0)
    wire.clear(run.folder / "limits", "cb")
    found["open"] = max(run.watch(3), default=0)
    run.watch(90, feed=False)
    found |= {"added": run.added, "done": run.done, "failed": run.failed, "pairs": run.pairs}
    heard = [one.state for one in run.listening.receive(2.0)]
    found["told"] = [one.limits for one in heard][-1:]
    run.manager.stop(block=True)
    run.listening.close()
    print("RESULT " + json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
