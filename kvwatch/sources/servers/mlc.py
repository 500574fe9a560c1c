"""What does MLC-LLM's server report? That it is there, and its models.

Its /metrics needs --enable-debug, is no valid exposition page, has no KV usage, and *sends a chat request
through the engine* for each reading: it is not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvwatch.model.server import Basis, EngineState, Evictable, Semantics, ServerState
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.http import parse_json
from kvwatch.sources.servers.base import Adapter, Clue, Endpoint, Pages, clean, not_expected, text

SEMANTICS = Semantics(
    evictable=Evictable.UNKNOWN,
    basis=Basis.OCCUPANCY,
    note="MLC-LLM tells no KV usage; its /metrics runs a request for each reading and is not read",
)
MODELS = "models"


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """One engine of which nothing is known."""
    del settings
    body = pages.get(MODELS, b"")
    answer = parse_json(body, "/v1/models")
    models = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(models, list) or not any(text(model, "owned_by") == "MLC-LLM" for model in models):
        raise not_expected(body, "models owned by MLC-LLM in /v1/models", "is this mlc_llm serve?")
    return ServerState(
        kind="mlc",
        semantics=SEMANTICS,
        engines=(EngineState(),),
        model=clean(", ".join(text(model, "id") for model in models[:4])),
        notes=(
            "MLC-LLM shows nothing that can be read without disturbing it: only whether it answers, and "
            "what the GPU's side tells",
        ),
    )


ADAPTER = Adapter(
    kind="mlc",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(Endpoint(name=MODELS, path="/v1/models"),),
    processes=(r"\bmlc_llm(?:\s+|\.cli\.|\.)serve\b", r"\bmlc_llm\.cli\.(?:worker|serve)\b"),
    clues=(Clue(path="/v1/models", body=re.compile(rb'"owned_by"\s*:\s*"MLC-LLM"')),),
)
