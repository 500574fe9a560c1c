"""Which figures does kvwatch get from which engine? The table in docs/engines.md, from the fixtures alone.

A cell says "yes" only where an adapter reads that figure from at least one page of that version here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from kvwatch.model.server import EngineState, Semantics, ServerState
from kvwatch.signals import occupancy
from kvwatch.signals.waste import waste
from kvwatch.sources.servers import registry
from tests.sources.servers import made, recorded

Reading = tuple[EngineState, Semantics]

NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "tgi": "TGI",
    "trtllm": "TensorRT-LLM",
    "triton": "Triton",
    "lmdeploy": "LMDeploy",
    "ollama": "Ollama",
    "dynamo": "Dynamo",
    "nim": "NIM",
    "lmcache": "LMCache",
    "lightllm": "LightLLM",
    "mlc": "MLC-LLM",
    "transformers": "transformers serve",
}


def engines() -> dict[str, str]:
    """Every kind that is an engine, with its name: those above, then other adapters by their kind."""
    others = (kind for kind in registry.kinds() if kind not in {*NAMES, "auto", "mapped"})
    return NAMES | {kind: kind for kind in others}


INTRO = """\
# What kvwatch gets from each engine

Generated from the pages under `tests/fixtures/servers` by `tests/sources/servers/coverage.py`. "yes" means
that the adapter reads this figure from at least one page of that version there; "–" means that it is
unknown, which is never 0. Pages are *recorded* from running servers, or *generated* after the project's
documentation and source where the server could not be run here.

* **usage**: `kvwatch_kv_usage_ratio`, in the meaning that the second table gives; **capacity** in tokens;
  **blocks** used and free.
* **preemptions**: the server's own counter. Without it there is no recompute tax.
* **limit**: the server's own limit of running requests (`ceiling: auto` needs it).
* **waste**: page-tail waste, `exact` or an `estimate` with bounds. An agent inside the server makes it exact.

The rule `kv_usage` can turn red only where the basis is *occupancy* and evictable blocks count as *free*.
Figures may be *fresh within* that many seconds only: still counters are no stall until then.
"""

START = """\
## How to start the server, and what can limit it

| engine | start it | what is unknown otherwise | lever for `control.targets[].via` |
| --- | --- | --- | --- |
| vLLM | without `--disable-log-stats` | everything | `lease`, with the [agent](agent.md) in it |
| SGLang | with `--enable-metrics` | latencies, retractions (before 0.5.10: everything) | `sglang`, no agent |
| llama.cpp | with `--metrics`, not `--no-slots` | counters, queue; KV usage | a [proxy](recipes/haproxy.md) |
| TensorRT-LLM | with `return_perf_metrics`, `enable_iter_perf_stats` | everything; KV usage | a proxy |
| transformers serve | with the agent in it | everything but up or down | `lease`, with the agent in it |

Others need no switch that is known here; what can limit them is a proxy in front of them, or a program of
yours ([hooks.md](hooks.md)). How to configure a limit: [policies.md](policies.md).
"""

RUN = """\
## What was really run

Beside these servers, running on CPUs with toy models, every figure on kvwatch's page was compared with the
server's own answer of the same instant.

| server | states | command |
| --- | --- | --- |
| vLLM 0.32.0 | idle, load, saturation, paused, engine stopped, killed and restarted | `make test-engines` |
| vLLM 0.32.0 | two data-parallel engines; two API servers | `make test-engines` |
| llama.cpp b11434 | idle, load, saturation; split and unified pool | `make test-engines-more` |
| llama.cpp b11434 | without `--metrics`, with `--no-slots`, both; `--kv-unified-per-slot` | the same |
| SGLang 0.5.23 | idle, load, retraction, warm cache; without `--enable-metrics` | the same |
| SGLang 0.5.23 | its batch limited by kvwatch, read back and given back | the same |
| transformers serve 5.24.0 | idle, load, killed | the same |
| Dynamo 1.6.1, front end and mocker | idle, load, saturation, unknown model, both killed | the same |
| Dynamo 1.6.1, front end | no worker yet; `DYN_METRICS_PREFIX` | the same |
| Dynamo 1.6.1, a worker with vLLM 0.32.0 | idle, preemption, killed | the same, with four processors |

Dynamo 1.6.1 asks for vLLM 0.31; two functions that it imports and a text model does not call were stood in
for. Its discovery was files; etcd, NATS, SGLang and TensorRT-LLM behind it, and its KV router were not run.

Not run, because they need an NVIDIA GPU by their own documentation: TensorRT-LLM and Triton with it, NIM,
LightLLM, LMDeploy's TurboMind, LMCache between GPU and host. Not run, because PyPI and Debian do not have the
server: TGI, Ollama, current MLC-LLM. Not tried: Triton with the vLLM backend. On a CPU one cannot see: GPU
memory of a server, tensor parallelism, CUDA graphs, KV offload tiers, and how fast anything is.
"""


def _any(values: Iterable[object]) -> str:
    return "yes" if any(value is not None for value in values) else "–"


def _waste(readings: Sequence[Reading]) -> str:
    found = {
        one.method
        for engine, semantics in readings
        if (one := waste(engine, semantics, occupancy.usage_ratio(engine.kv, semantics), ())) is not None
    }
    return ", ".join(sorted(found)) or "–"


def _field(get: Callable[[EngineState], object]) -> Callable[[Sequence[Reading]], str]:
    return lambda readings: _any(get(engine) for engine, _ in readings)


COLUMNS: dict[str, Callable[[Sequence[Reading]], str]] = {
    "usage": lambda readings: _any(occupancy.usage_ratio(engine.kv, meaning) for engine, meaning in readings),
    "capacity": lambda readings: _any(occupancy.capacity_tokens(engine.kv) for engine, _ in readings),
    "blocks": _field(lambda engine: engine.kv.used_blocks),
    "running": _field(lambda engine: engine.scheduler.running),
    "waiting": _field(lambda engine: engine.scheduler.waiting),
    "preemptions": _field(lambda engine: engine.scheduler.preemptions_total),
    "TTFT": _field(lambda engine: engine.ttft),
    "TPOT": _field(lambda engine: engine.tpot),
    "queue time": _field(lambda engine: engine.queue),
    "limit": _field(lambda engine: engine.scheduler.max_running),
    "waste": _waste,
}


def document() -> str:
    """The whole of docs/engines.md."""
    return "\n".join((INTRO, START, *_figures(), "", *_meanings(), "", *_paths(), "", RUN))


def _states() -> dict[tuple[str, str], list[ServerState]]:
    """What the adapters read, by engine and version, in the order of `engines()`."""
    order = list(engines())
    states: dict[tuple[str, str], list[ServerState]] = {}
    for case in sorted(recorded.cases(), key=lambda case: (order.index(case.kind), *_by_number(case))):
        state = registry.adapter(case.kind).parse(case.pages(), case.settings())
        states.setdefault((case.kind, case.folder.name), []).append(state)
    return states


def _by_number(case: recorded.Case) -> tuple[list[tuple[int, str]], str]:
    """0.6.6 before 0.10.2, and each version's cases together."""
    parts = re.findall(r"\d+|\D+", case.folder.name)
    return [(int(part), "") if part.isdecimal() else (10**9, part) for part in parts], case.name


def _figures() -> list[str]:
    generated = {tuple(path.split("/")[:2]) for path, _ in made.pages()}
    lines = [_row("engine", "version", "pages", *COLUMNS), _row(*["---"] * (len(COLUMNS) + 3))]
    for (kind, version), states in _states().items():
        readings = [(engine, state.semantics) for state in states for engine in state.engines]
        cells = [column(readings) for column in COLUMNS.values()]
        source = "generated" if (kind, version) in generated else "recorded"
        lines.append(_row(engines()[kind], version, source, *cells))
    return lines


def _meanings() -> list[str]:
    head = ("engine", "version", "evictable count as", "basis", "fresh within", "meaning")
    lines = ["## What usage means", "", _row(*head), _row(*["---"] * len(head))]
    for (kind, version), states in _states().items():
        for meaning in dict.fromkeys(state.semantics for state in states):
            fresh = f"{meaning.fresh_within_s:g} s" if meaning.fresh_within_s else "last step"
            note = f"**Reading disturbs others.** {meaning.note}" if meaning.destructive else meaning.note
            lines.append(_row(engines()[kind], version, meaning.evictable, meaning.basis, fresh, note))
    return lines


def _paths() -> list[str]:
    lines = ["## What is asked for", "", _row("engine", "`kind`", "paths"), _row("---", "---", "---")]
    for kind, name in engines().items():
        paths = [
            f"`{endpoint.path}`" + (" (optional)" if endpoint.optional else "")
            for endpoint in registry.adapter(kind).endpoints
        ]
        lines.append(_row(name, f"`{kind}`", ", ".join(paths)))
    return lines


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
