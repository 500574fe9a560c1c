"""Which answers are about evidence? The list, one piece as a page or as JSON, and an alert's link."""

from __future__ import annotations

import json
import re
from urllib.parse import unquote, unquote_plus

from kvwatch.catalogue.alert_evidence import FOLDER, LATEST, PARTS, EvidenceId, parse
from kvwatch.exporters.provider import EvidenceShelf, Provider
from kvwatch.exporters.state import Json, dumps
from kvwatch.exporters.web_http import (
    GZIP_MIN_BYTES,
    HttpError,
    Request,
    Response,
    accepts_gzip,
    gzip_compress,
)

API = "/api/v1/evidence"
MAX_VALUE = 256  # characters of one parameter of a link
HTML = "text/html; charset=utf-8"
JSON = "application/json; charset=utf-8"
_RULE = re.compile(r"[a-z_]{1,40}\Z")
# What a file that is none of ours (any JSON) can bring about while a page is made of it.
_DAMAGED = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
    OSError,  # a time that no calendar has
)
NO_STORE = ("Cache-Control", "no-store")
VARY = ("Vary", "Accept-Encoding")


def is_mine(path: str) -> bool:
    """Whether a path is about evidence."""
    return path.startswith((FOLDER, f"{API}/")) or path in ("/evidence", API)


class EvidenceRoutes:
    """Answers what `is_mine`. `page_headers` protect every page."""

    def __init__(self, provider: Provider, page_headers: tuple[tuple[str, str], ...]) -> None:
        self._provider = provider
        self._page_headers = (*page_headers, NO_STORE, VARY)

    @property
    def _shelf(self) -> EvidenceShelf:
        return self._provider.evidence()

    def answer(self, request: Request) -> Response:
        """The answer; HttpError 400 for a bad link, 404 for what is not kept, 503 where the disk fails."""
        path = request.path
        if path == "/evidence":
            return self._redirect("/evidence/")
        if path == FOLDER:
            return self._list(request)
        if path == LATEST:
            return self._latest(request)
        if path in (API, f"{API}/"):
            return self._packed(request, dumps(self._listed()), JSON)
        if path.startswith(FOLDER):
            return self._page(request, self._read(path.removeprefix(FOLDER)))
        return self._packed(request, self._read(path.removeprefix(f"{API}/")), JSON)

    def _packed(self, request: Request, body: bytes, kind: str, status: int = 200) -> Response:
        gzip = len(body) >= GZIP_MIN_BYTES and accepts_gzip(request.header("accept-encoding"))
        headers = self._page_headers if kind == HTML else (NO_STORE, VARY)
        return Response(
            status=status,
            body=gzip_compress(body) if gzip else body,
            content_type=kind,
            headers=headers,
            gzip=gzip,
        )

    def _redirect(self, target: str) -> Response:
        headers = (*self._page_headers, ("Location", target))
        return Response(status=302, body=f"see {target}\n".encode(), headers=headers)

    def _read(self, part: str) -> bytes:
        """One piece. The shelf knows only names that it gave itself, so no path leads anywhere else."""
        name = unquote(part)
        if parse(name) is None:
            raise HttpError(404, "there is no such evidence; /evidence/ lists what there is")
        try:
            data = self._shelf.read(name)
        except OSError as error:
            why = error.strerror or str(error)
            raise HttpError(503, f"the evidence cannot be read now: {why}") from error
        if data is None:
            raise HttpError(404, "there is no such evidence (any more); /evidence/ lists what there is")
        return data

    def _page(self, request: Request, data: bytes) -> Response:
        from kvwatch.exporters.evidence_page import evidence

        try:
            found = json.loads(data)
            body = evidence(found, self._level_now(found))
        except _DAMAGED as error:
            raise HttpError(500, "this piece of evidence is damaged; its file can be deleted") from error
        return self._packed(request, body, HTML)

    def _level_now(self, found: Json) -> str:
        report = self._provider.report()
        for verdict in report.verdicts if report is not None else ():
            scope = verdict.scope
            here = (verdict.rule.value, scope.server, scope.engine, scope.uuid)
            if here == (found["rule"], found["server"], found["engine"], found["uuid"]):
                return verdict.level.name.lower()
        return ""

    def _known(self) -> list[tuple[str, EvidenceId]]:
        pairs = ((name, parse(name)) for name in self._shelf.names())
        return [(name, found) for name, found in pairs if found is not None]

    def _list(self, request: Request) -> Response:
        from kvwatch.exporters.evidence_page import listing, moment, where

        rows = [(moment(k.wall_s), name, k.rule, where(k.shown())) for name, k in self._known()]
        return self._packed(request, listing(rows, self._shelf.tally()), HTML)

    def _listed(self) -> Json:
        tally = self._shelf.tally()
        return {
            "schema": 1,
            "evidence": [
                {"id": name, "wall_s": k.wall_s, "rule": k.rule, **k.shown()} for name, k in self._known()
            ],
            "written_total": tally.written_total,
            "failed_total": tally.failed_total,
            "dropped_total": tally.dropped_total,
            "unwritten": tally.unwritten,
            "size_bytes": tally.size_bytes,
            "problem": tally.problem,
        }

    def _latest(self, request: Request) -> Response:
        wanted = _wanted(request.query)
        for name, known in self._known():
            if known.answers(wanted):
                return self._redirect(f"{FOLDER}{name}")
        from kvwatch.exporters.evidence_page import nothing_found

        said = " ".join(f"{name} {value}" for name, value in wanted.items() if value) or "anything"
        return self._packed(request, nothing_found(said), HTML, status=404)


def _wanted(query: str) -> dict[str, str]:
    """The parameters of an alert's link; others are passed over. HttpError 400."""
    found: dict[str, str] = {}
    for pair in query.split("&"):
        name, given, value = pair.partition("=")
        if not given or name not in ("rule", *PARTS):
            continue
        text = unquote_plus(value)
        if len(text) > MAX_VALUE or (name == "rule" and not _RULE.match(text)):
            raise HttpError(400, f"{name} is not what an alert's link has; /evidence/ lists what there is")
        found[name] = text
    return found
