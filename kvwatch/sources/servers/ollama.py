"""What does Ollama report? Which models are loaded and their bytes: no KV usage, no queue, no requests.

`size_vram` is Ollama's own estimate of weights, KV cache and graph together; it goes into the notes,
because no field of a server's state means that. Real bytes come from the GPU's side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvwatch.model.server import Basis, EngineState, Evictable, Semantics, ServerState
from kvwatch.model.settings import GIB, ServerSettings
from kvwatch.sources.http import parse_json
from kvwatch.sources.servers.base import (
    Adapter,
    Clue,
    Endpoint,
    Pages,
    clean,
    not_expected,
    number,
    text,
    told,
)

SEMANTICS = Semantics(
    evictable=Evictable.UNKNOWN,
    basis=Basis.SLOTS,
    note="Ollama tells neither KV usage nor requests; only which models are loaded, and their bytes",
)
LOADED, VERSION = "ps", "version"
MAX_SHOWN = 4


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """One engine of which nothing is known, and the loaded models."""
    del settings
    answer = parse_json(pages[LOADED], "/api/ps")
    models = answer.get("models") if isinstance(answer, Mapping) else None
    if not isinstance(models, list) or not all(isinstance(model, Mapping) for model in models):
        raise not_expected(pages[LOADED], "list `models` in /api/ps", "is this Ollama?")
    return ServerState(
        kind="ollama",
        semantics=SEMANTICS,
        engines=(EngineState(),),
        version=text(told(pages.get(VERSION), "/api/version"), "version"),
        model=clean(", ".join(_name(model) for model in models[:MAX_SHOWN])),
        notes=(
            "Ollama shows no KV usage, queue or latency; an agent or the GPU's side must tell",
            *([_loaded(model) for model in models[:MAX_SHOWN]] or ["no model is loaded"]),
        ),
    )


def _name(model: Mapping[str, object]) -> str:
    return text(model, "name") or text(model, "model") or "?"


def _loaded(model: Mapping[str, object]) -> str:
    device, context = number(model, "size_vram"), number(model, "context_length")
    size = f"{device / GIB:.1f} GiB on the GPU by Ollama's estimate" if device else "nothing on the GPU"
    if device is None:
        size = "bytes on the GPU unknown"
    return f"{_name(model)}: {size}" + (f", context {context:.0f} tokens" if context else "")


ADAPTER = Adapter(
    kind="ollama",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(
        Endpoint(name=LOADED, path="/api/ps"),
        Endpoint(name=VERSION, path="/api/version", optional=True, every_s=600.0),
    ),
    processes=(r"\bollama\s+serve\b", r"\bollama\s+runner\b", r"\bollama_llama_server\b"),
    clues=(Clue(path="/api/ps", body=re.compile(rb'^\s*\{\s*"models"\s*:\s*\[')),),
)
