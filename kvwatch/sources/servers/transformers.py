"""What does `transformers serve` report? That it is there: no version has a metrics endpoint.

Its KV cache can be read from inside only, by kvwatch's agent in the serving process. /health
answers 503 once the worker of continuous batching has died.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvwatch.model.server import Basis, EngineState, Evictable, Semantics, ServerState
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.http import parse_json
from kvwatch.sources.servers.base import Adapter, Clue, Endpoint, Pages, not_expected, text, told

SEMANTICS = Semantics(
    # Up to 5.5 cached blocks counted as free, in 5.24 as used; an agent inside tells them apart.
    evictable=Evictable.UNKNOWN,
    basis=Basis.OCCUPANCY,
    note="transformers serve tells nothing over HTTP; KV usage comes from an agent inside it",
)
HEALTH, MODELS = "health", "models"


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """One engine of which nothing is known."""
    del settings
    answer = parse_json(pages[HEALTH], "/health")
    if text(answer, "status") != "ok":
        raise not_expected(pages[HEALTH], '{"status":"ok"} in /health', "is this transformers serve?")
    return ServerState(
        kind="transformers",
        semantics=SEMANTICS,
        engines=(EngineState(),),
        model=_only_model(pages.get(MODELS)),
        notes=(
            "transformers serve has no metrics: without an agent inside it only /health is known, and what "
            "the GPU's side tells",
        ),
    )


def _only_model(body: bytes | None) -> str:
    """The model, where the server lists one; it lists all models of the local cache, loaded or not.

    One started on a folder ("local") is listed by that path: its last part is the name.
    """
    answer = told(body, "/v1/models")
    models = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(models, list) or len(models) != 1:
        return ""
    name = text(models[0], "id")
    return name.rstrip("/").rsplit("/", 1)[-1] if text(models[0], "owned_by") == "local" else name


ADAPTER = Adapter(
    kind="transformers",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(
        Endpoint(name=HEALTH, path="/health"),
        # Listing the models makes the server look through its cache folder: once a day is enough.
        Endpoint(name=MODELS, path="/v1/models", optional=True, every_s=86_400.0),
    ),
    processes=(r"\btransformers(?:-cli)?\s+serve\b", r"\btransformers\.cli\.\w+\s+serve\b"),
    clues=(
        # The only server whose entries begin with the owner (in some 5.x a list of the model's name parts).
        Clue(
            path="/v1/models",
            body=re.compile(
                rb'\{\s*"owned_by"\s*:\s*(?:\[[^\]]*\]|"[^"]*")\s*,\s*"id"\s*:\s*"[^"]*"\s*,\s*"object"\s*:\s*"model"'
            ),
        ),
    ),
)
