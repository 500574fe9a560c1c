"""What does LMCache report: the internal API server of an engine's LMCache, or the multiprocess server?

It is a cache behind an engine, on the host and beyond: usage here is the fill of LMCache's own CPU
cache, not of the KV pool on the GPU. It is filled to the brim on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvwatch.model.server import Basis, EngineState, Evictable, KvCacheState, Semantics, ServerState
from kvwatch.model.settings import GIB, ServerSettings
from kvwatch.sources.exposition import pick, ratio
from kvwatch.sources.servers._page import Page
from kvwatch.sources.servers.base import METRICS, Adapter, Clue, Endpoint, Pages, not_expected, number, told

SEMANTICS = Semantics(
    evictable=Evictable.USED,
    basis=Basis.OCCUPANCY,
    note="fill of LMCache's cache in host memory, all of it evictable; not the KV pool on the GPU",
)
CONFIG = "conf"
PREFIXES = ("lmcache:", "lmcache_mp_")  # within an engine; the multiprocess server (dots made underscores)
LOCAL, REMOTE, DISK = "local_cache_usage", "remote_cache_usage", "local_storage_usage"  # bytes
FILL = "l1_usage_ratio"
REQUESTED = "num_requested_tokens"
NAMES = (LOCAL, REMOTE, DISK, FILL, REQUESTED)
CAPACITY = "max_local_cpu_size"  # of /conf, in GiB though LMCache says GB


def parse(pages: Pages, settings: ServerSettings) -> ServerState:
    """One engine that has a fill level and nothing else; the tiers' bytes are in the notes."""
    del settings
    body = pages[METRICS]
    families = pick(body, {prefix + name for prefix in PREFIXES for name in NAMES})
    if not families:
        raise not_expected(
            body,
            "series of LMCache (lmcache:… or lmcache_mp_…)",
            "set `internal_api_server_enabled: true` and point `url` at that port (6999 and up)",
        )
    inside, server = (Page(families=families, prefix=prefix) for prefix in PREFIXES)
    usage = ratio(server.gauge(FILL).get("0"))
    if usage is None:
        usage = _fill(inside.gauge(LOCAL).get("0"), pages.get(CONFIG))
    for page in (inside, server):
        page.refuse_disputed()
    return ServerState(
        kind="lmcache",
        semantics=SEMANTICS,
        engines=(EngineState(kv=KvCacheState(usage_ratio=usage)),),
        model=inside.label_values("model_name"),
        notes=(*_notes(inside, usage, body), *families.findings),
    )


def _fill(used_bytes: float | None, config: bytes | None) -> float | None:
    """Bytes in the CPU cache over the capacity that /conf tells."""
    capacity = _capacity_bytes(told(config, "/conf"))
    return ratio(used_bytes / capacity) if capacity and used_bytes is not None else None


def _capacity_bytes(answer: object) -> float | None:
    inner = answer.get("config") if isinstance(answer, Mapping) else None
    size = number(inner if isinstance(inner, Mapping) else answer, CAPACITY)
    return size * GIB if size is not None and size > 0 else None


def _notes(page: Page, usage: float | None, body: bytes) -> list[str]:
    notes = ["LMCache has no requests of its own: watch the engine that uses it as a server of its own"]
    if re.search(rb"(?m)^(?:vllm|sglang):", body):
        notes.append("the engine's own series are on this page too: add it with its own `kind`")
    tiers = (("CPU", LOCAL), ("disk", DISK), ("remote", REMOTE))
    bytes_of = [(tier, page.gauge(name).get("0")) for tier, name in tiers]
    shown = [
        f"{tier} {held / GIB:.2f} GiB" for tier, held in bytes_of if held is not None and 0 <= held < 1e18
    ]
    if shown:
        notes.append("cached: " + ", ".join(shown))
    if usage is None:
        notes.append("the capacity is unknown (/conf does not tell max_local_cpu_size), and so is usage")
    return notes


ADAPTER = Adapter(
    kind="lmcache",
    parse=parse,
    semantics=SEMANTICS,
    endpoints=(
        Endpoint(name=METRICS, path="/metrics"),
        Endpoint(name=CONFIG, path="/conf", optional=True, every_s=60.0),
    ),
    processes=(r"\blmcache_(?:server|controller)\b", r"\blmcache\.v1\.(?:server|multiprocess)\b"),
    clues=(
        # A vLLM server with LMCache inside shows lmcache: series as well; that is a vLLM server.
        Clue(
            path="/metrics",
            body=re.compile(rb"(?ms)\A(?!.*^(?:vllm|sglang):)(?=.*^(?:# TYPE )?(?:lmcache:|lmcache_mp_))"),
        ),
    ),
)
