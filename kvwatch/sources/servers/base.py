"""What is an adapter, and how is a server polled with one?

To add an engine write one module `kvwatch/sources/servers/<kind>.py` with an `ADAPTER`, a test and a recorded
page. The module's name is the kind; nothing else names it: the registry, `auto`, the contract tests and
the attribution of processes find it by itself.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvwatch.model.sample import FailureKind
from kvwatch.model.server import Semantics, ServerState
from kvwatch.model.settings import ServerSettings
from kvwatch.sources.base import Source, SourceError
from kvwatch.sources.exposition import Families, printable
from kvwatch.sources.http import Deadline, HttpClient, HttpStatusError, parse_json

Pages = Mapping[str, bytes]  # bodies of the endpoints that answered, by Endpoint.name
Parse = Callable[[Pages, ServerSettings], ServerState]

METRICS = "metrics"  # the endpoint whose path `metrics_path` replaces
MAX_ENGINES = 256
_NOT_THERE = (404, 405, 501)
MAX_LABEL_CHARACTERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One path to GET.

    An `optional` one may be missing or fail without failing the poll. With `every_s` the last
    answer, or its absence, is kept that many seconds; it is forgotten when the server fails.
    """

    name: str
    path: str
    optional: bool = False
    every_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """How `auto` knows an engine: what `path` answers matches the pattern `body`."""

    path: str
    body: re.Pattern[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One engine: where to look, what its figures mean, how to recognise it, how to read it.

    `parse` is pure; it raises nothing but SourceError and leaves None what is not there.
    `processes` are regular expressions (for `re.search`) on a process's command line or title.
    `make` replaces the ordinary source where polling itself differs.
    """

    kind: str
    parse: Parse
    semantics: Semantics
    endpoints: tuple[Endpoint, ...] = ()
    processes: tuple[str, ...] = ()
    clues: tuple[Clue, ...] = ()
    make: Callable[[ServerSettings], Source[ServerState]] | None = None


class PolledServer:
    """A source that GETs an adapter's endpoints over one connection and parses what came."""

    def __init__(
        self,
        adapter: Adapter,
        settings: ServerSettings,
        *,
        client: HttpClient | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = f"server/{settings.name}"
        self.period_s = settings.period_s
        self.expected_period_s = settings.period_s
        self.deadline_s = settings.timeout_s
        self._adapter = adapter
        self._settings = settings
        self._client = client or HttpClient(settings.url, auth=settings.auth, tls=settings.tls)
        self._now = now
        self._kept: dict[str, tuple[float | None, bytes | None]] = {}

    def poll(self) -> ServerState:
        """One reading within `deadline_s` in all; raises SourceError."""
        return self.poll_within(Deadline(self.deadline_s))

    def poll_within(self, deadline: Deadline) -> ServerState:
        """One reading within what is left of a deadline; raises SourceError."""
        try:
            pages = {e.name: self._get(e, deadline) for e in self._adapter.endpoints if not e.optional}
            self._add_optional(pages, deadline)
            return self._adapter.parse(pages, self._settings)
        except SourceError:
            self._kept.clear()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _add_optional(self, pages: dict[str, bytes], deadline: Deadline) -> None:
        """Add what answers. While nothing has answered, a failure is the server's, not the endpoint's."""
        refused: SourceError | None = None
        for endpoint in self._adapter.endpoints:
            if not endpoint.optional:
                continue
            try:
                body = self._optional(endpoint, deadline)
            except HttpStatusError as error:
                refused = refused or error if error.status not in _NOT_THERE else refused
            except SourceError:
                if not pages:
                    raise
            else:
                if body is not None:
                    pages[endpoint.name] = body
        if refused is not None and not pages:
            raise refused

    def _optional(self, endpoint: Endpoint, deadline: Deadline) -> bytes | None:
        at_s, body = self._kept.get(endpoint.name, (None, None))
        if at_s is not None and self._now() - at_s < endpoint.every_s:
            return body
        self._kept[endpoint.name] = (self._now(), None)
        body = self._get(endpoint, deadline)
        self._kept[endpoint.name] = (self._now(), body)
        return body

    def _get(self, endpoint: Endpoint, deadline: Deadline) -> bytes:
        path = endpoint.path
        if endpoint.name == METRICS and self._settings.metrics_path:
            path = "/" + self._settings.metrics_path.lstrip("/")
        try:
            return self._client.get(path, deadline=deadline).body
        except HttpStatusError as error:
            if error.status in _NOT_THERE and not endpoint.optional:
                raise SourceError(
                    FailureKind.NOT_EXPECTED,
                    f"{error.failure.message}; is this {self._adapter.kind}, and is {path} switched on?",
                ) from error
            raise


def not_expected(page: bytes, wanted: str, fix: str) -> SourceError:
    """The error for a 200 without the series an engine must have: what was wanted, what came, the fix."""
    return SourceError(FailureKind.NOT_EXPECTED, f"no {wanted} there, but {describe(page)}; {fix}")


def describe(page: bytes) -> str:
    """What a page is, in a few words."""
    start = page[:4096].lstrip()
    if not start:
        return "an empty page"
    if start[:1] == b"<":
        return "an HTML page"
    if start[:1] in b"[{":
        return "JSON"
    names = re.findall(rb"(?m)^([a-zA-Z]\w{0,30}?)[:_]\w*[ {]", page[: 256 * 1024])
    spaces = sorted({name.decode() for name in names})
    return f"series of {', '.join(spaces[:6])}" if spaces else "something that is no metrics page"


@functools.lru_cache(maxsize=512)
def clean(text: str) -> str:
    """A foreign label value made fit for a label of ours: printable, on one line, not long."""
    return printable(text, MAX_LABEL_CHARACTERS)


def told(body: bytes | None, path: str) -> object:
    """The JSON of an endpoint that need not be there; None where it is not, or is no JSON."""
    if body is None:
        return None
    try:
        return parse_json(body, path)
    except SourceError:
        return None


def text(answer: object, name: str) -> str:
    """A text of a JSON object, made fit to be shown; "" where there is none."""
    value = answer.get(name) if isinstance(answer, Mapping) else None
    return clean(value) if isinstance(value, str) else ""


def number(answer: object, name: str) -> float | None:
    """A number of a JSON object; None for anything else."""
    value = answer.get(name) if isinstance(answer, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:
        return None
    return float(value)


def label_values(families: Families, name: str) -> str:
    """The values of one label over a page, joined, four at most (a server's model names)."""
    values = {labels[name] for labels in families.label_sets() if labels.get(name)}
    return clean(", ".join(sorted(values)[:4]))


def engine_names(names: Iterable[str]) -> tuple[str, ...]:
    """Engine names in order: ranks by number, then text. Raises SourceError(TOO_LARGE) for a flood."""
    known = set(names)
    if len(known) > MAX_ENGINES:
        raise SourceError(
            FailureKind.TOO_LARGE,
            f"the page has {len(known)} engines; {MAX_ENGINES} at most are watched per server",
        )
    return tuple(sorted(known, key=_rank))


def _rank(name: str) -> tuple[bool, int, str]:
    number = name.isascii() and name.isdecimal()
    return (not number, len(name) if number else 0, name)
