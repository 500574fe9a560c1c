"""vLLM's own scheduler and KV-cache manager in this process: only the sampled token ids are made up.

Runs in an environment that has vLLM; no GPU and no weights are needed.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

ENGINES = Path(os.environ.get("KVWATCH_ENGINES_DIR", Path(__file__).parent.parent.parent / "engines-work"))


class OldScheduler(Scheduler):
    """As before 0.31: one attribute is both the admission limit and the bound of the assertion."""

    @property
    def max_num_active_reqs(self) -> int:
        return self.max_num_running_reqs

    @max_num_active_reqs.setter
    def max_num_active_reqs(self, _: int) -> None:
        """The constructor of the new class sets it; the old class had none."""


class World:
    """One scheduler under a load of random requests."""

    def __init__(
        self, kind: type[Scheduler] = Scheduler, *, blocks: int = 2000, block_size: int = 16, seqs: int = 256
    ) -> None:
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(ENGINES / "tiny-llama"), dtype="float32", max_model_len=4096, served_model_name="x"
            ),
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=seqs,
                max_num_batched_tokens=8192,
                max_model_len=4096,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=False,
            ),
            device_config=DeviceConfig(device="cpu"),
        )
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self.scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=False,
        )
        self._random = random.Random(5)
        self._count = 0
        self.preemptions = 0

    def add(self, prompt: int, generate: int) -> None:
        """One more request."""
        self._count += 1
        name = f"r{self._count}"
        parameters = SamplingParams(
            max_tokens=generate,
            ignore_eos=True,
            temperature=0.0,
            output_kind=RequestOutputKind.CUMULATIVE,
            detokenize=False,
        )
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=[self._random.randrange(3, 300) for _ in range(prompt)],
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.scheduler.add_request(Request.from_engine_core_request(request, self._hasher))

    def fill(self, waiting: int = 40) -> None:
        """Keep the queue this long."""
        while len(self.scheduler.waiting) < waiting:
            self.add(self._random.choice((64, 128, 512, 1500)), self._random.choice((64, 200, 600)))

    def step(self) -> float:
        """One engine step; seconds that `schedule()` took."""
        scheduler = self.scheduler
        began_s = time.perf_counter()
        out = scheduler.schedule()
        took_s = time.perf_counter() - began_s
        self.preemptions += len(out.preempted_req_ids or ())
        names = list(out.num_scheduled_tokens)
        requests = scheduler.requests
        tokens = [
            [self._random.randrange(3, 300)]
            if requests[name].num_computed_tokens >= requests[name].num_tokens
            else []
            for name in names
        ]
        scheduler.update_from_output(
            out,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=tokens,
            ),
        )
        return took_s

    def brute(self) -> dict[str, int]:
        """The block state, counted the long way from vLLM's own tables."""
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        real = [block for block in pool.blocks if not block.is_null]
        tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        return {
            "num": len(real),
            "used": sum(block.ref_cnt > 0 for block in real),
            "evictable": sum(block.ref_cnt == 0 and block.block_hash is not None for block in real),
            "free": sum(block.ref_cnt == 0 and block.block_hash is None for block in real),
            "held": sum(len(tables[request.request_id]) for request in scheduler.running),
            "tokens": sum(request.num_computed_tokens for request in scheduler.running),
        }
