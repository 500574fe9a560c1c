"""Which engine answers at this URL? Tries what the adapters say they are known by, and remembers."""

from __future__ import annotations

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import Semantics, ServerState
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.base import SourceError
from kvwatch.sources.http import Deadline, HttpClient, HttpStatusError
from kvwatch.sources.servers import registry
from kvwatch.sources.servers.base import Adapter, Pages, PolledServer

FORGET_AFTER = 5  # failures in a row, after which another engine may be there


class AutoServer:
    """A source that finds its adapter at the first poll, and anew after several failures."""

    def __init__(self, settings: ServerSettings) -> None:
        self.name = f"server/{settings.name}"
        self.period_s = settings.period_s
        self.expected_period_s = settings.period_s
        self.deadline_s = settings.timeout_s
        self._settings = settings
        self._client = HttpClient(settings.url, auth=settings.auth, tls=settings.tls)
        self._found: PolledServer | None = None
        self._failures = 0

    def poll(self) -> ServerState:
        """One reading, detection included, within `deadline_s` in all; raises SourceError."""
        deadline = Deadline(self.deadline_s)
        try:
            if self._found is None:
                self._found = PolledServer(self._detect(deadline), self._settings, client=self._client)
            state = self._found.poll_within(deadline)
        except SourceError:
            self._failures += 1
            if self._failures >= FORGET_AFTER:
                self._found, self._failures = None, 0
            raise
        self._failures = 0
        return state

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _detect(self, deadline: Deadline) -> Adapter:
        adapters = [registry.adapter(kind) for kind in registry.kinds()]
        telling: SourceError | None = None
        for path in _paths(adapters):
            try:
                body = self._client.get(path, deadline=deadline).body
            except HttpStatusError as error:
                # Engines guard some paths and not others: a 401 ends nothing, but explains a failure.
                if error.failure.kind in (FailureKind.LOADING, FailureKind.UNAUTHORISED):
                    telling = error
                continue
            for adapter in adapters:
                if any(clue.path == path and clue.body.search(body) for clue in adapter.clues):
                    return adapter
        if telling is not None:
            raise telling
        known = ", ".join(adapter.kind for adapter in adapters if adapter.clues)
        raise SourceError(
            FailureKind.NOT_EXPECTED,
            f"what answers at {self._settings.url} is none of {known}; "
            "name its `kind`, or map its page with `mapped`",
        )


def _paths(adapters: list[Adapter]) -> list[str]:
    """Each path once; /metrics last, as reading it costs most and disturbs some servers."""
    paths = dict.fromkeys(clue.path for adapter in adapters for clue in adapter.clues)
    return sorted(paths, key=lambda path: path == "/metrics")


def _unread(_pages: Pages, settings: ServerSettings) -> ServerState:
    raise SourceError(FailureKind.NOT_EXPECTED, f"{settings.name}: `auto` reads no page itself")


ADAPTER = Adapter(
    kind="auto", parse=_unread, semantics=Semantics(note="that of the engine found"), make=AutoServer
)
