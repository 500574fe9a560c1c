"""Which kinds of servers are there, and how is a source for one made? Adapters are found by module name."""

from __future__ import annotations

import importlib

import kvwatch.sources.servers as package
from kvwatch.model.sample import FailureKind
from kvwatch.model.server import ServerState
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.base import Source, SourceError
from kvwatch.sources.servers.base import Adapter, PolledServer

# Kinds the configuration names whether or not an adapter is here already.
CONTRACT_KINDS = (
    "vllm",
    "sglang",
    "llamacpp",
    "tgi",
    "trtllm",
    "triton",
    "lmdeploy",
    "ollama",
    "dynamo",
    "nim",
    "lmcache",
    "lightllm",
    "mlc",
    "transformers",
    "auto",
    "mapped",
)
kinds = package.kinds


def known_kinds() -> tuple[str, ...]:
    """Every kind a configuration may name: those of the contract and those found here."""
    return CONTRACT_KINDS + tuple(kind for kind in kinds() if kind not in CONTRACT_KINDS)


def adapter(kind: str) -> Adapter:
    """The adapter of a kind, imported at its first use; raises SourceError(NOT_EXPECTED) without one."""
    here = kinds()
    if kind not in here:
        why = "is not supported yet" if kind in CONTRACT_KINDS else "is unknown"
        raise SourceError(
            FailureKind.NOT_EXPECTED,
            f"servers of kind {kind!r} {why}; use one of {', '.join(here)} (`mapped` reads any metrics page)",
        )
    found: Adapter = importlib.import_module(f"{package.__name__}.{kind}").ADAPTER
    return found


def create(settings: ServerSettings) -> Source[ServerState]:
    """A source named `server/<name>`; it touches no network before its first poll. Raises SourceError."""
    found = adapter(settings.kind)
    return found.make(settings) if found.make else PolledServer(found, settings)


def process_patterns(kind: str) -> tuple[str, ...]:
    """Regular expressions that recognise a kind's processes by command line or title.

    `auto` has those of every kind; a kind without adapter has none.
    """
    here = kinds()
    wanted = here if kind == "auto" else tuple(name for name in here if name == kind)
    return tuple(pattern for name in wanted for pattern in adapter(name).processes)
