"""Triton: selector labels, its inconsistent sample, several models, the vLLM backend."""

from __future__ import annotations

import pytest

from kvwatch.sources.base import SourceError
from tests.sources.servers.made import gauge, page, sample
from tests.sources.servers.reading import only, parse, read, refusal


def test_selector_labels_are_told_apart() -> None:
    """Ratio, token count and blocks stand under one name; each lands in its own field."""
    engine = only(read("triton", "tensorrtllm", "busy"))

    assert (engine.kv.num_blocks, engine.kv.used_blocks, engine.kv.block_size_tokens) == (6239, 3000, 64)
    assert engine.kv.usage_ratio == 3000 / 6239
    assert (engine.scheduler.running, engine.scheduler.waiting, engine.scheduler.max_running) == (20, 5, 64)
    assert engine.scheduler.steps_total == 88123


def test_inconsistent_page_prefers_used_over_max() -> None:
    """Triton's own sample has used 1, free 6239 of 6239 and a fraction of 0.49: used over max counts."""
    kv = only(read("triton", "tensorrtllm", "inconsistent")).kv

    assert kv.usage_ratio == 1 / 6239
    assert (kv.used_blocks, kv.free_blocks) == (1, 6238)


def test_fraction_stands_in_where_blocks_are_missing() -> None:
    """With the fraction alone, it is the usage."""
    text = page(gauge("nv_trt_llm_kv_cache_block_metrics", 0.4, model="m", kv_cache_block_type="fraction"))

    assert only(parse("triton", metrics=text)).kv.usage_ratio == 0.4


def test_models_are_engines() -> None:
    """Two TensorRT-LLM models on one Triton are two engines, named as the models."""
    text = page(
        *(
            [sample("nv_trt_llm_request_metrics", n, model=m, request_type="scheduled")]
            for m, n in (("a", 1), ("b", 2))
        )
    )

    assert [(e.engine, e.scheduler.running) for e in parse("triton", metrics=text).engines] == [
        ("a", 1),
        ("b", 2),
    ]


def test_two_versions_of_one_model_are_refused() -> None:
    """Two values for one model's figure cannot be told apart."""
    text = page(
        *(
            [sample("nv_trt_llm_request_metrics", n, model="m", version=n, request_type="scheduled")]
            for n in (1, 2)
        )
    )

    with pytest.raises(SourceError, match="several"):
        parse("triton", metrics=text)


def test_vllm_backend_is_read_as_vllm() -> None:
    """The vLLM backend passes vLLM's series through."""
    state = read("triton", "vllm", "half")

    assert state.kind == "triton"
    assert only(state).kv.usage_ratio == 0.46875


def test_triton_without_a_language_model_is_refused() -> None:
    """A Triton that serves other models has nothing to watch here."""
    text = page(gauge("nv_inference_request_success", 5, model="resnet"))

    assert "TensorRT-LLM" in refusal("triton", metrics=text).message
