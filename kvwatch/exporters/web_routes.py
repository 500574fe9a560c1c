"""Which answer belongs to which path? All come from the last report; nothing here waits for a source."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path

from kvwatch.exporters.events import events_page
from kvwatch.exporters.prometheus import OPENMETRICS_CONTENT_TYPE, TEXT_CONTENT_TYPE, Page
from kvwatch.exporters.provider import Provider
from kvwatch.exporters.state import dumps, state
from kvwatch.exporters.web_evidence import EvidenceRoutes, is_mine
from kvwatch.exporters.web_http import (
    GZIP_MIN_BYTES,
    HttpError,
    Request,
    Response,
    accepts_gzip,
    gzip_compress,
    wants_openmetrics,
)
from kvwatch.model.report import TickReport

JSON = "application/json; charset=utf-8"
NOTHING = "there is nothing here; try /, /metrics, /api/v1/state, /api/v1/events or /evidence/"
NO_STORE = ("Cache-Control", "no-store")
VARY = ("Vary", "Accept, Accept-Encoding")
ASSETS = Path(__file__).parent / "assets"
PAGE_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
)
_STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/assets/status.css": ("status.css", "text/css; charset=utf-8"),
    "/assets/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/favicon.ico": ("icon.svg", "image/svg+xml"),
}


class Rendered:
    """Pages of the newest report, each made when it is first asked for and at most once per report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # two scrapes at once must not render twice
        self._report: TickReport | None = None
        self._pages: dict[str, bytes] = {}

    def get(self, report: TickReport | None, kind: str, make: Callable[[], bytes], *, gzip: bool) -> bytes:
        """The page of this kind, compressed if asked."""
        with self._lock:
            if report is not self._report:
                self._report, self._pages = report, {}
            key = f"{kind}+gzip" if gzip else kind
            if key not in self._pages or report is None:
                if kind not in self._pages or report is None:
                    self._pages[kind] = make()
                if gzip:
                    self._pages[key] = gzip_compress(self._pages[kind])
            return self._pages[key]


class Routes:
    """Answers requests from a provider."""

    def __init__(self, provider: Provider, *, enable_lifecycle: bool) -> None:
        self._provider = provider
        self._enable_lifecycle = enable_lifecycle
        self._metrics_page = Page()
        self._rendered = Rendered()
        self._assets: dict[str, bytes] = {}
        self._evidence = EvidenceRoutes(provider, PAGE_HEADERS)
        self._reloading = threading.Lock()  # one reload at a time; a second is turned away
        self._get: dict[str, Callable[[Request], Response]] = {
            "/metrics": self._metrics,
            "/api/v1/state": self._state,
            "/api/v1/events": self._events,
            "/-/healthy": self._healthy,
            "/-/ready": self._ready,
            **dict.fromkeys(_STATIC, self._static),
        }

    def answer(self, request: Request) -> Response:
        """The answer; HttpError for what cannot be answered."""
        route = self._get.get(request.path)
        if request.path == "/-/reload":
            if request.method != "POST":
                raise HttpError(405, "reload wants POST", headers=(("Allow", "POST"),))
            return self._reload(request)
        if route is None and is_mine(request.path):
            route = self._evidence.answer
        if route is None:
            raise HttpError(404, NOTHING)
        if request.method not in ("GET", "HEAD"):
            raise HttpError(405, f"{request.path} wants GET", headers=(("Allow", "GET, HEAD"),))
        return route(request)

    def _metrics(self, request: Request) -> Response:
        report = self._provider.report()
        openmetrics = wants_openmetrics(request.header("accept"))
        gzip = accepts_gzip(request.header("accept-encoding"))
        body = self._rendered.get(
            report,
            "openmetrics" if openmetrics else "text",
            lambda: self._metrics_page.render(report, openmetrics=openmetrics),
            gzip=gzip,
        )
        kind = OPENMETRICS_CONTENT_TYPE if openmetrics else TEXT_CONTENT_TYPE
        return Response(body=body, content_type=kind, headers=(NO_STORE, VARY), gzip=gzip)

    def _state(self, request: Request) -> Response:
        report = self._provider.report()
        if report is None:
            body = dumps({"schema": 1, "state": "starting", "detail": "there is no report yet"})
            return Response(
                status=503, body=body, content_type=JSON, headers=(NO_STORE, ("Retry-After", "1"))
            )
        gzip = accepts_gzip(request.header("accept-encoding"))
        body = self._rendered.get(report, "state", lambda: dumps(state(report)), gzip=gzip)
        return Response(body=body, content_type=JSON, headers=(NO_STORE, VARY), gzip=gzip)

    def _events(self, request: Request) -> Response:
        since = _since(request.query)
        body = events_page(self._provider.events(since))
        gzip = len(body) >= GZIP_MIN_BYTES and accepts_gzip(request.header("accept-encoding"))
        return Response(
            body=gzip_compress(body) if gzip else body, content_type=JSON, headers=(NO_STORE, VARY), gzip=gzip
        )

    def _healthy(self, _request: Request) -> Response:
        if self._provider.healthy():
            return Response(body=b"kvwatch is healthy.\n", headers=(NO_STORE,))
        return Response(status=503, body=b"kvwatch's loop has stopped ticking.\n", headers=(NO_STORE,))

    def _ready(self, _request: Request) -> Response:
        ready, missing = self._provider.ready()
        if ready:
            return Response(body=b"kvwatch is ready.\n", headers=(NO_STORE,))
        text = "".join([f"no good sample yet: {name}\n" for name in missing]) or "not ready yet\n"
        return Response(status=503, body=text.encode("utf-8", "replace"), headers=(NO_STORE,))

    def _reload(self, request: Request) -> Response:
        if not self._enable_lifecycle:
            raise HttpError(
                403, "reload over HTTP is off; start kvwatch with --web.enable-lifecycle, or send SIGHUP"
            )
        origin = request.header("origin")
        if origin and origin.partition("://")[2] != request.header("host"):
            raise HttpError(403, "reload is not for other sites")
        if not self._reloading.acquire(blocking=False):
            raise HttpError(503, "another reload is under way")
        try:
            findings = self._provider.reload()
        finally:
            self._reloading.release()
        if findings:
            text = "".join([f"{finding}\n" for finding in findings])
            return Response(status=400, body=text.encode("utf-8", "replace"), headers=(NO_STORE,))
        return Response(body=b"The configuration is loaded.\n", headers=(NO_STORE,))

    def _static(self, request: Request) -> Response:
        name, kind = _STATIC[request.path]
        gzip = accepts_gzip(request.header("accept-encoding"))
        key = f"{name}+gzip" if gzip else name
        if key not in self._assets:
            body = (ASSETS / name).read_bytes()
            self._assets[key] = gzip_compress(body) if gzip else body
        headers = (*PAGE_HEADERS, ("Vary", "Accept-Encoding"))
        return Response(body=self._assets[key], content_type=kind, headers=headers, gzip=gzip)


def _since(query: str) -> float:
    """The `since` parameter as Unix seconds; 0 where it is missing."""
    for pair in query.split("&"):
        name, _, value = pair.partition("=")
        if name == "since" and value:
            try:
                since = float(value)
            except ValueError:
                since = math.nan
            if not math.isfinite(since):
                raise HttpError(400, "since must be Unix seconds, such as since=1795996800")
            return since
    return 0.0
