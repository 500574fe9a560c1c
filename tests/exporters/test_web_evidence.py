"""Evidence over HTTP: the list, one piece, an alert's link, and what is no piece."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvwatch.exporters import evidence_doc
from kvwatch.exporters.evidence_svg import Figure, curve, strip
from kvwatch.exporters.provider import EvidenceTally
from kvwatch.exporters.state import Json, dumps
from kvwatch.model.level import RuleId
from tests.exporters import sample
from tests.exporters.evidence import ROWS, piece, red
from tests.exporters.serve import Answer, FixedProvider, FixedShelf, ask, serving
from tests.exporters.test_status_page import BROWSER

HOSTILE = "<script>alert(1)</script>\"'&<img src=x>"
FALLING = [4e9 - 6e6 * second for second in range(ROWS)]


class Elements(HTMLParser):
    """Start tags with their attributes, and text; complains about what is not closed."""

    VOID = frozenset({"meta", "link", "br", "path", "rect"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID or (tag in ("path", "rect") and not self.get_starttag_text().endswith("/>")):  # type: ignore[union-attr]
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shelf_of(*pieces: Json) -> FixedProvider:
    shelf = FixedShelf(pieces={str(found["id"]): evidence_doc.encoded(found) for found in pieces})
    return FixedProvider(shelf=shelf)


def get(provider: FixedProvider, path: str, **headers: str) -> Answer:
    with serving(provider) as server:
        return ask(server, path, **headers)


def test_the_page_has_all_that_a_woken_person_needs() -> None:
    """Cause, command, curve, holders, deeds, runbook; no script, no inline style, strict headers."""
    found = piece(RuleId.DEVICE_HEADROOM, headroom_bytes=FALLING, used_bytes=FALLING[::-1])
    answer = get(shelf_of(found), f"/evidence/{found['id']}")
    page = Elements(answer.body.decode())
    tags = [tag for tag, _ in page.tags]

    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-frame-options"] == "DENY"
    for wanted in (
        "GPU 0 has 380 MiB left.",
        "ps -o pid,user,lstart,args -p 31337",
        "runbook KvwatchDeviceHeadroomLow",
        "Headroom (free, and what the allocator could return)",
        "Level of device_headroom",
        "KV in use 52.0 GiB",
        "31337",
        "at most",
        "now ▲ red",
    ):
        assert wanted in page.text, wanted
    assert tags.count("svg") >= 4
    assert "script" not in tags
    assert not [attributes for _, attributes in page.tags if "style" in attributes]
    assert ("a", {"href": "/"}) in page.tags
    assert ("a", {"href": found["runbook"]}) in page.tags


def test_hostile_names_stay_text() -> None:
    """Whatever a process, a server or a message calls itself becomes text, in elements and attributes."""
    found = piece(RuleId.DEVICE_HEADROOM, cause=HOSTILE, headroom_bytes=FALLING)
    text = json.dumps(found)
    for word in ("chat", "NVIDIA H200", "device_headroom of"):
        text = text.replace(word, json.dumps(HOSTILE)[1:-1])
    found = json.loads(text) | {"runbook": "javascript:alert(1)", "mode": HOSTILE, "version": HOSTILE}
    answer = get(shelf_of(found), f"/evidence/{found['id']}")
    page = Elements(answer.body.decode())

    assert answer.status == 200
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img"})
    assert HOSTILE in page.text
    assert "javascript:" not in answer.body.decode()
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_secrets_are_cut_out() -> None:
    """A password in a command line, a message or the command to type is in no file and on no page."""
    found = piece(RuleId.DEVICE_HEADROOM, cause="it said --api-key hunter2 and died")

    assert "hunter2" not in evidence_doc.encoded(found).decode()


def test_the_same_as_json() -> None:
    """The piece under /api/v1 is the file itself; packed where asked."""
    found = piece(RuleId.RECOMPUTE_TAX, recompute_tax_ratio=[0.01] * ROWS)
    provider = shelf_of(found)
    plain = get(provider, f"/api/v1/evidence/{found['id']}")
    packed = get(provider, f"/api/v1/evidence/{found['id']}", Accept_Encoding="gzip")

    assert plain.headers["content-type"] == "application/json; charset=utf-8"
    assert json.loads(plain.body) == json.loads(dumps(found))
    assert packed.headers["content-encoding"] == "gzip"
    assert len(packed.body) < len(plain.body) / 2


def test_the_list_has_the_newest_first_and_says_what_is_wrong() -> None:
    """List and JSON name every piece with its scope, and the reason why the newest is not on disk."""
    old, new = piece(RuleId.RECOMPUTE_TAX), piece(RuleId.GPU_LOST)
    new["id"] = str(new["id"]).replace("20261130T0000", "20261130T0100")
    provider = shelf_of(old, new)
    provider.shelf.told = EvidenceTally(written_total=1, failed_total=2, problem="no space <left>")
    page = Elements(get(provider, "/evidence/").body.decode())
    listed = json.loads(get(provider, "/api/v1/evidence").body)

    assert page.text.index("gpu_lost") < page.text.index("recompute_tax")
    assert "no space <left>" in page.text
    assert [each["id"] for each in listed["evidence"]] == [new["id"], old["id"]]
    assert listed["evidence"][1]["server"] == "chat"
    assert (listed["written_total"], listed["failed_total"]) == (1, 2)
    assert get(provider, "/evidence").headers["location"] == "/evidence/"


def test_an_alert_s_link_leads_to_the_newest_that_fits() -> None:
    """Just the labels of the alert find the piece; those of another place find none."""
    tax, lost = piece(RuleId.RECOMPUTE_TAX), piece(RuleId.GPU_LOST)
    older = {**tax, "id": str(tax["id"]).replace("20261130", "20261129")}
    provider = shelf_of(older, tax, lost)
    asked = "/evidence/latest?rule=recompute_tax&server=chat&engine=0&uuid=&gpu=7"
    answer = get(provider, asked)

    assert (answer.status, answer.headers["location"]) == (302, f"/evidence/{tax['id']}")
    assert get(provider, answer.headers["location"]).status == 200
    uuid = sample.uuid(2)
    found = get(provider, f"/evidence/latest?rule=gpu_lost&server=&engine=&uuid={uuid}")
    assert found.headers["location"] == f"/evidence/{lost['id']}"
    assert get(provider, "/evidence/latest?rule=gpu_lost&server=&engine=&uuid=GPU-other").status == 404


def test_a_link_to_nothing_says_so_and_leads_to_the_status_page() -> None:
    """Where nothing was kept the page says for what, and links on; hostile labels stay text."""
    answer = get(FixedProvider(), "/evidence/latest?rule=gpu_lost&server=%3Cscript%3Ex&engine=")
    page = Elements(answer.body.decode())

    assert answer.status == 404
    assert "There is no evidence for rule gpu_lost server <script>x on this host." in page.text
    assert ("a", {"href": "/"}) in page.tags
    assert answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/evidence/latest?rule=../../etc/passwd", 400),
        ("/evidence/latest?rule=%0d%0aSet-Cookie:x", 400),
        (f"/evidence/latest?server={'x' * 300}", 400),
        ("/evidence/../../../etc/passwd", 404),
        ("/evidence/%2e%2e%2fstate.json", 404),
        ("/evidence/..%2f..%2f20261130T000000Z-gpu_lost-~~", 404),
        ("/evidence/20261130T000000Z-gpu_lost-~~GPU-1", 404),
        ("/evidence/20261130T000000Z-gpu_lost-~~GPU-1/x", 404),
        ("/evidence/%00", 404),
        ("/evidence/%ff%fe", 404),
        ("/evidence//", 404),
        ("/api/v1/evidence/..", 404),
        ("/api/v1/evidence/latest", 404),
        ("/evidencex", 404),
    ],
)
def test_what_is_no_piece(path: str, status: int) -> None:
    """Traversal, injected headers and names that are none end in an error without reading anything."""
    answer = get(FixedProvider(), path)

    assert answer.status == status
    assert b"root:" not in answer.body
    assert "set-cookie" not in answer.headers


def test_a_disk_that_fails_and_a_file_that_is_damaged() -> None:
    """The first is 503 with the reason, the second 500 with the remedy; neither ends the server."""
    found = piece(RuleId.GPU_LOST)
    provider = shelf_of(found)
    provider.shelf.failure = TimeoutError("the state directory does not answer")
    late = get(provider, f"/evidence/{found['id']}")
    provider.shelf.failure = None
    damaged = []
    hollow = {**found["curve"], "t_s": []}  # type: ignore[dict-item]
    for data in (
        *(b"{", b"[]", b"{}", b'"x"', b"[" * 100_000, dumps({**found, "curve": {"t_s": 3}})),
        *(json.dumps({**found, "wall_s": at}).encode() for at in (1e300, 1e17, float("inf"))),
        json.dumps({**found, "after": {"t_s": [], "curve": {"t_s": [1.0, 2.0]}}, "curve": hollow}).encode(),
    ):
        provider.shelf.pieces[str(found["id"])] = data
        damaged.append(get(provider, f"/evidence/{found['id']}").status)

    assert (late.status, b"does not answer" in late.body) == (503, True)
    assert damaged == [500] * 10


def test_only_get_and_head() -> None:
    """Nothing here can be changed."""
    with serving() as server:
        assert ask(server, "/evidence/", method="POST").status == 405
        assert ask(server, "/evidence/", method="HEAD").body == b""


def test_a_piece_that_is_too_large_is_cut_short() -> None:
    """A host of thousands of processes and engines gives a piece of at most 1 MiB that is still a page."""
    found = piece(RuleId.DEVICE_HEADROOM, headroom_bytes=FALLING)
    found["curve"]["tracks"] *= 200  # type: ignore[index]
    data = evidence_doc.encoded(found)
    provider = FixedProvider(shelf=FixedShelf(pieces={str(found["id"]): data}))

    assert len(data) <= evidence_doc.MAX_BYTES
    assert json.loads(data)["cut_short"] is True
    assert get(provider, f"/evidence/{found['id']}").status == 200


def test_the_minute_after_is_joined_on() -> None:
    """Rows after red go on where those before end, and the deeds of that minute are told."""
    report = sample.report()
    verdict = red(RuleId.RECOMPUTE_TAX, report)
    found = piece(RuleId.RECOMPUTE_TAX, recompute_tax_ratio=[0.04] * ROWS)
    before = found["curve"]["tracks"][0]  # type: ignore[index]
    rows = {"values": {"recompute_tax_ratio": [0.06, 0.09]}, "levels": {"recompute_tax": [2, 2]}}
    later = {"t_s": [1.0, 2.0], "tracks": [{**before, **rows}]}
    found["after"] = evidence_doc.after(report, verdict.scope, verdict.rule.value, later, sample.events())
    page = Elements(get(shelf_of(found), f"/evidence/{found['id']}").body.decode())

    assert "4.0 % when red, from 4.0 % to 9.0 %" in page.text
    assert "until 2 s after" in page.text
    assert "The rule was red at 2026-11-30 00:00:00 UTC." in page.text


def test_curves_have_gaps_where_nothing_was_known() -> None:
    """A line is not drawn across what is unknown; two known points are needed for one at all."""
    figure = Figure(title="x", unit="number")
    drawn = curve([0.0, 1.0, 2.0, 30.0, 31.0], [1.0, 2.0, None, 3.0, 4.0], figure)

    assert len(re.findall(r'class="line" d="M[^"]*M', drawn)) == 1
    assert curve([0.0, 1.0], [None, 1.0], figure) == ""
    assert strip([0.0, 1.0], [None, None], "r") == ""
    assert "green for 1 s, red for 0 s" in strip([0.0, 1.0], [0, 2], "r")


def test_a_scope_that_is_gone_has_no_level_now() -> None:
    """A server that is no longer watched is "not judged", not green."""
    found = piece(RuleId.RECOMPUTE_TAX)
    found["server"] = "gone"
    page = Elements(get(shelf_of(found), f"/evidence/{found['id']}").body.decode())

    assert "now ? not judged" in page.text


@pytest.mark.needs("chromium")
@pytest.mark.timeout(120)
def test_a_browser_has_nothing_to_complain_about(tmp_path: Path) -> None:
    """Neither the content policy nor the markup of the page raises an error in a real browser."""
    found = piece(RuleId.DEVICE_HEADROOM, headroom_bytes=FALLING, used_bytes=FALLING[::-1])
    with serving(shelf_of(found)) as server:
        done = subprocess.run(
            [*BROWSER, f"--user-data-dir={tmp_path}", f"{server.url}/evidence/{found['id']}"],
            capture_output=True,
            text=True,
            timeout=90,
            check=True,
        )

    assert "CONSOLE" not in done.stderr
    assert "Next command" in done.stdout
