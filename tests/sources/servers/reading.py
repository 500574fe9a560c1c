"""Short cuts for the tests of single adapters."""

from __future__ import annotations

from kvwatch.model.sample import Failure
from kvwatch.model.server import EngineState, ServerState
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.servers import registry
from tests.sources.loopback import Handler, serving
from tests.sources.servers import recorded


def parse(kind: str, *, metrics_path: str | None = None, **bodies: bytes) -> ServerState:
    """What an adapter reads from these pages."""
    return registry.adapter(kind).parse(
        bodies, ServerSettings(name="x", kind=kind, metrics_path=metrics_path)
    )


def read(kind: str, version: str, case: str) -> ServerState:
    """What an adapter reads from a fixture."""
    found = recorded.Case(recorded.ROOT / kind / version, case)
    return registry.adapter(kind).parse(found.pages(), found.settings())


def only(state: ServerState) -> EngineState:
    """The one engine of a state."""
    (engine,) = state.engines
    return engine


def refusal(kind: str, **bodies: bytes) -> Failure:
    """Why an adapter refuses these pages; fails the test when it does not."""
    try:
        state = parse(kind, metrics_path=None, **bodies)
    except SourceError as error:
        return error.failure
    raise AssertionError(f"read as {state}")


def poll(kind: str, handler: Handler) -> ServerState | Failure:
    """One poll of a loopback server: its state or the failure."""
    with serving(handler) as server:
        source = registry.create(ServerSettings(name="x", kind=kind, url=server.url, timeout_s=5.0))
        try:
            return source.poll()
        except SourceError as error:
            return error.failure
        finally:
            source.close()
