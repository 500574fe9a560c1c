"""How does a piece of evidence look to a person? One HTML page without a script, made from its JSON alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvwatch.exporters.evidence_doc import DEEDS
from kvwatch.exporters.evidence_svg import Figure, bar, curve, escape, shown, size, strip
from kvwatch.exporters.provider import EvidenceTally

Json = Mapping[str, Any]

SIGN = {"red": "▲", "yellow": "!", "green": "✓", "unknown": "?"}
PARTS = {
    "driver_reserved": "driver", "weights": "weights", "kv_used": "KV in use", "kv_free": "KV free",
    "engine_other": "engine, other", "other_process": "other processes", "dead_process": "dead processes",
    "unattributed": "unattributed", "free": "free",
}  # fmt: skip
FIGURES = {
    "headroom_bytes": Figure(title="Headroom (free, and what the allocator could return)", unit="bytes"),
    "used_bytes": Figure(title="Memory in use", unit="bytes", from_zero=False),
    "used_peak_bytes": Figure(title="Peak of memory in use over a minute", unit="bytes", from_zero=False),
    "free_bytes": Figure(title="Memory free", unit="bytes"),
    "kv_usage_ratio": Figure(title="KV pool in use", unit="ratio"),
    "recompute_tax_ratio": Figure(title="Engine time lost to recomputing", unit="ratio"),
    "waiting": Figure(title="Requests waiting", unit="number"),
    "running": Figure(title="Requests running", unit="number"),
    "preemptions_per_s": Figure(title="Preemptions", unit="per_second"),
    "latency_slo": Figure(title="Worst p95 latency, as a multiple of its objective", unit="times"),
    "device_exhaustion": Figure(title="Time until device memory is gone", unit="seconds"),
    "alloc_retries": Figure(title="Allocator retries", unit="per_minute"),
    "largest_allocatable": Figure(title="Largest block that can be allocated", unit="bytes"),
}
# The figure that a rule's thresholds belong to.
RULE_FIGURE = {"recompute_tax": "recompute_tax_ratio", "device_headroom": "headroom_bytes"}
LIST_JSON = "/api/v1/evidence"
NOTHING = '<p class="why">{}</p>'


def page(title: str, body: str, *, json_path: str) -> bytes:
    """A whole page around a body, in the dress of the status page."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} · kvwatch</title>\n"
        '<link rel="icon" href="/favicon.ico" type="image/svg+xml">\n'
        '<link rel="stylesheet" href="/assets/status.css">\n</head>\n<body>\n<header class="top">\n'
        f"<h1>kvwatch</h1><p>{escape(title)}</p>"
        '<nav aria-label="Other pages"><a href="/">status</a> <a href="/evidence/">all evidence</a> '
        f'<a href="{escape(json_path)}">JSON</a></nav>\n</header>\n'
        f"<main>\n{body}\n</main>\n</body>\n</html>\n"
    ).encode("utf-8", "replace")


def moment(wall_s: object) -> str:
    """A Unix time as people read it, in UTC."""
    if not isinstance(wall_s, int | float):
        return "unknown time"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s))


def where(found: Json) -> str:
    """A scope in words; the names of its fields are those of the JSON."""
    server = "/".join(str(found[name]) for name in ("server", "engine") if found.get(name))
    gpu = f"GPU {found.get('gpu') or found['uuid']}" if found.get("gpu") or found.get("uuid") else ""
    return " on ".join(part for part in (server, gpu) if part) or "this host"


def evidence(found: Json, now: str) -> bytes:
    """The page of one piece. `now` is the rule's level at the moment, "" where it is not judged any more."""
    title = f"{found['rule']} of {where(found)}, {moment(found['wall_s'])}"
    demo = found.get("demo")
    parts = [
        f'<p class="notice">A demonstration ({escape(demo)}): everything here is simulated.</p>'
        if demo
        else "",
        f'<p class="headline red"><span class="word">▲ red</span><span>{escape(found["cause"])}</span></p>',
        _subtitle(found, now),
        _next(found),
        _section("The ten minutes before", _curves(found)),
        _section("Who holds the memory", "".join(map(_gpu, _rows(found["facts"].get("gpus"))))),
        _section("What was advised or done", _deeds(found)),
        _section("The events before", _events(found.get("events"), "Nothing is kept of that time.")),
    ]
    return page(title, "\n".join(part for part in parts if part), json_path=f"/api/v1/evidence/{found['id']}")


def _rows(found: object) -> Sequence[Json]:
    return found if isinstance(found, list) else []


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _subtitle(found: Json, now: str) -> str:
    chip = f'<span class="chip {now or "unknown"}">{SIGN.get(now, "?")} {now or "not judged"}</span>'
    threshold = _shown_value(found, "red")
    facts = [
        f"{escape(found['rule'])} of {escape(where(found))}",
        f"red since {moment(found['wall_s'])}",
        f"value {_shown_value(found, 'value')}",
        f"red at {threshold}" if threshold != "unknown" else "",
        f"kvwatch {escape(found['version'])}, mode {escape(found['mode'])}",
    ]
    return f'<p class="why">{" · ".join(filter(None, facts))} · now {chip}</p>'


def _shown_value(found: Json, name: str) -> str:
    rule = str(found["rule"])
    figure = FIGURES.get(RULE_FIGURE.get(rule, rule))
    return escape(shown(figure.unit if figure else "number", found.get(name)))


def _next(found: Json) -> str:
    step, runbook = found["next"], found.get("runbook") or ""
    link = (
        f' The whole procedure: <a href="{escape(runbook)}">runbook {escape(found.get("alert") or "")}</a>.'
        if runbook.startswith("https://")
        else ""
    )
    return (
        f'<section><h2>Next command</h2><pre class="command"><code>{escape(step["command"])}</code></pre>'
        f'<p class="why">{escape(step["why"])}{link}</p></section>'
    )


# The curve


def _curves(found: Json) -> str:
    t_s, tracks = _joined(found)
    if not tracks or len(t_s) < 2:
        return NOTHING.format("There is no curve: kvwatch had been running for less than two seconds.")
    scope = (found["server"], found["engine"], found["uuid"])
    own = [t for t in tracks if (t["server"], t["engine"], t["uuid"]) == scope]
    around = [t for t in tracks if t not in own]
    bare = not any(t["values"] for t in own)  # a fault without a figure: show what is around it at once
    made = [_track(found, t_s, track, closed=False) for track in own]
    made += [_track(found, t_s, track, closed=not bare) for track in around]
    return _axis(t_s) + "".join(made)


def _joined(found: Json) -> tuple[list[float], list[dict[str, Any]]]:
    """The rows before and after red as one: (seconds, tracks)."""
    before, later = found["curve"], (found.get("after") or {}).get("curve") or {"t_s": [], "tracks": []}
    old, new = len(before["t_s"]), len(later["t_s"])
    more = {(t["server"], t["engine"], t["uuid"]): t for t in later["tracks"]}
    tracks = []
    for track in before["tracks"]:
        rest = more.get((track["server"], track["engine"], track["uuid"]), {})
        joined = dict(track)
        for kind in ("values", "levels"):
            mine, theirs = track.get(kind) or {}, rest.get(kind) or {}
            joined[kind] = {
                name: mine.get(name, [None] * old) + theirs.get(name, [None] * new)
                for name in dict.fromkeys([*mine, *theirs])
            }
        tracks.append(joined)
    return [*before["t_s"], *later["t_s"]], tracks


def _axis(t_s: Sequence[float]) -> str:
    later = f" · until {t_s[-1]:.0f} s after" if t_s[-1] >= 1.0 else ""
    return NOTHING.format(f"From {shown('seconds', -t_s[0])} before red{later}; the upright line is red.")


def _track(found: Json, t_s: Sequence[float], track: Json, *, closed: bool) -> str:
    title, values = where(_with_index(found, track)), track["values"]
    first = RULE_FIGURE.get(found["rule"], found["rule"]) if not closed else ""
    names = [n for n in dict.fromkeys([first, *FIGURES]) if n in values and n in FIGURES]
    drawn = [strip(t_s, track["levels"].get(found["rule"], ()), found["rule"])]
    for name in names:
        lines = (
            [(lv, found[lv]) for lv in ("yellow", "red") if found.get(lv) is not None]
            if name == first
            else []
        )
        drawn.append(curve(t_s, values[name], FIGURES[name], lines))
    body = "".join(drawn)
    if not body:
        return ""
    if closed:
        head = f"<summary>{escape(title)}</summary>"
        return f'<details class="card">{head}<div class="curves">{body}</div></details>'
    return f'<div class="card"><h3>{escape(title)}</h3><div class="curves">{body}</div></div>'


def _with_index(found: Json, track: Json) -> dict[str, Any]:
    index = next((g["index"] for g in _rows(found["facts"].get("gpus")) if g["uuid"] == track["uuid"]), "")
    return {**track, "gpu": f"{index}" if track["uuid"] else ""}


# Who holds the memory


def _gpu(gpu: Json) -> str:
    title = f"GPU {gpu['index']} · {gpu.get('name') or 'unknown model'}"
    memory = gpu.get("memory") or {}
    said = (
        f"{size(memory['used_bytes'])} of {size(memory['total_bytes'])} in use, "
        f"{size(memory['free_bytes'])} free"
        if memory
        else "its memory is not known"
    )
    return (
        f'<article class="card"><header><h3>{escape(title)}</h3></header>'
        f'<p class="sub">{escape(gpu["uuid"])} · {escape(gpu["state"])} · {escape(said)}</p>'
        f"{_ledger(gpu, memory)}{_holders(gpu)}</article>"
    )


def _ledger(gpu: Json, memory: Json) -> str:
    parts = [
        (p["part"], float(p["bytes"]), f"{PARTS.get(p['part'], p['part'])} {size(p['bytes'])}")
        for p in _rows(gpu.get("ledger"))
        if p["bytes"] > 0 and p["part"] in PARTS
    ]
    if not parts or not memory:
        return ""
    words = ", ".join(words for _, _, words in parts)
    legend = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" fill="var(--{part})"/>'
        f"</svg>{escape(text)}</li>"
        for part, _, text in parts
    )
    return bar(parts, float(memory["total_bytes"]), f"Memory: {words}") + f'<ul class="legend">{legend}</ul>'


def _holders(gpu: Json) -> str:
    holders = gpu.get("holders")
    if holders is None:
        return NOTHING.format("Which processes hold it is not known here.")
    rows = [
        [
            "unknown" if h["used_bytes"] is None else size(h["used_bytes"]),
            str(h["pid"]),
            "dead" if h["dead"] else h["server"] or "no watched server",
            h["command"] or h["name"] or "unknown",
        ]
        for h in holders
    ]
    more = gpu.get("holders_left_out")
    rest = NOTHING.format(f"{int(more)} smaller ones are left out.") if more else ""
    return table(("Memory", "PID", "Server", "Process"), rows) + rest


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, raw: bool = False) -> str:
    """A table that folds on a phone. `raw` cells are HTML already."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-label="{escape(name)}">{cell if raw else escape(cell)}</td>'
            for name, cell in zip(columns, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""


# What was advised or done


def _deeds(found: Json) -> str:
    after = found.get("after") or {}
    events = [e for e in [*_rows(found.get("events")), *_rows(after.get("events"))] if e["kind"] in DEEDS]
    limits = [_limit(each) for each in _rows(after.get("limits") or found["facts"].get("limits"))]
    said = "".join(f"<li>{escape(text)}</li>" for text in limits if text)
    made = f'<ul class="plain">{said}</ul>' if said else ""
    if events:
        made += _events(events, "")
    if not made:
        mode = {"observe": " (mode observe: kvwatch only watches)"}.get(found["mode"], "")
        made = NOTHING.format(f"Nothing was advised and nothing was done{mode}.")
    if after:
        made += NOTHING.format(f"The rule was {escape(after['level'])} at {moment(after['wall_s'])}.")
    else:
        made += NOTHING.format("What came in the minute after is not here (yet).")
    return f'<div class="card">{made}</div>'


def _limit(limit: Json) -> str:
    wanted, verb = limit.get("active"), "imposed"
    if limit["state"] == "advised":
        wanted, verb = limit.get("would_be"), "advised, not imposed"
    if limit["state"] == "none" or not wanted:
        return ""
    words = [] if wanted["admit"] else ["admit no new request"]
    if wanted["max_running"] is not None:
        words.append(f"at most {wanted['max_running']} requests running")
    what = ", ".join(words) or "no limit"
    return " · ".join(
        filter(None, (f"{limit['server']}: {what} ({verb})", limit["imposed_by"], limit["reason"]))
    )


def _events(events: object, nothing: str) -> str:
    rows = [
        f"<li><time>{moment(e.get('wall_s'))}</time>"
        f'<span class="chip {escape(e.get("level_to") or "unknown")}">'
        f"{escape(e.get('level_to') or e['kind'])}</span> {escape(e['message'])}</li>"
        for e in reversed(_rows(events))
    ]
    if not rows:
        return NOTHING.format(escape(nothing)) if nothing else ""
    return f'<div class="card"><ul class="plain">{"".join(rows)}</ul></div>'


# The list


def listing(rows: Iterable[Sequence[str]], tally: EvidenceTally) -> bytes:
    """Every piece there is: (time, name, rule, where) of each, and how keeping them goes."""
    cells = [
        [escape(at), f'<a href="/evidence/{escape(name)}">{escape(rule)}</a>', escape(place)]
        for at, name, rule, place in rows
    ]
    made = table(("When", "Rule", "Where"), cells, raw=True)
    if tally.problem:
        made = f'<p class="notice">{escape(tally.problem)}</p>{made}'
    body = made or NOTHING.format("No paging rule has turned red here.")
    kept = (
        f"{tally.written_total} written since start, {tally.failed_total} could not be written, "
        f"{tally.dropped_total} left out, {tally.unwritten} in memory only; {size(tally.size_bytes)} on disk."
    )
    return page("Evidence", f'<div class="card">{body}</div>{NOTHING.format(kept)}', json_path=LIST_JSON)


def nothing_found(wanted: str) -> bytes:
    """What a link from an alert shows where nothing was kept."""
    body = (
        f'<p class="headline unknown"><span class="word">? none</span><span>There is no evidence for '
        f"{escape(wanted)} on this host.</span></p>"
        + NOTHING.format(
            "Evidence is kept when a paging rule turns red, at most once in ten minutes; the oldest goes "
            'first. <a href="/">The status page</a> shows what is true now, '
            '<a href="/evidence/">the list</a> everything that is kept.'
        )
    )
    return page("No evidence", body, json_path=LIST_JSON)
