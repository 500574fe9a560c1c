"""The whole file: its top keys, and the checks that look across them."""

from __future__ import annotations

from typing import Any

from kvwatch.config import readers, units
from kvwatch.config.acting import CONTROL, NEEDS_CONSENT, NOTIFY
from kvwatch.config.findings import quoted, suggestion
from kvwatch.config.nodes import ListNode, ScalarNode
from kvwatch.config.readers import BAD
from kvwatch.config.rulebook import RULES, shipped
from kvwatch.config.table import Field, Record, Table, attribute_default, list_of_tables
from kvwatch.config.watching import GPUS, SERVER
from kvwatch.model.settings import (
    ControlSettings,
    Mode,
    RecordSettings,
    Settings,
    TargetSettings,
    WebSettings,
)


def _build_web(listen: tuple[str, int] | None = None, **given: Any) -> WebSettings:
    return WebSettings(**given) if listen is None else WebSettings(host=listen[0], port=listen[1], **given)


WEB = Table(
    title="web",
    help="The HTTP server. Flags of `kvwatch run` win over these.",
    build=_build_web,
    fields=(
        Field(
            "listen",
            readers.listen,
            "Where it listens; `[::1]:9843` for IPv6, `:9843` for every address",
            default="`127.0.0.1:9843`",
        ),
        Field("config_file", readers.path, "TLS and users, in exporter-toolkit's format", default="none"),
        Field("enable_lifecycle", readers.boolean, "Whether `POST /-/reload` works"),
    ),
)


def _build_agents(socket: str | None = None) -> str | None:
    return socket


AGENTS = Table(
    title="agents",
    help="Where agents inside servers send to.",
    build=_build_agents,
    fields=(
        Field(
            "socket",
            readers.socket_path,
            "Path of the datagram socket",
            default="`agent.sock` in the runtime directory",
        ),
    ),
)
RECORD = Table(
    title="record",
    help="Recordings of every report. This version checks these keys and records nothing yet.",
    build=RecordSettings,
    fields=(
        Field("dir", readers.path, "Where recordings go", default="none: nothing is recorded"),
        Field("max_bytes", readers.size(1024 * 1024), "Size at which the oldest are removed"),
    ),
)


def _build_settings(**given: Any) -> Settings:
    given.setdefault("rules", dict(shipped()))
    return Settings(**given)


ROOT = Table(
    title="Top level",
    build=_build_settings,
    fields=(
        Field(
            "tick",
            readers.duration(0.02, 10.0),
            "Longest time between two decisions; a new sample brings the next forward",
            attr="tick_s",
        ),
        Field("web", WEB, "The HTTP server"),
        Field("gpus", GPUS, "The GPUs"),
        Field("servers", list_of_tables(SERVER, "a list of servers"), "The servers"),
        Field("agents", AGENTS, "Agents inside servers", attr="agents_socket"),
        Field("rules", RULES, "The rules"),
        Field("notify", list_of_tables(NOTIFY, "a list of notifications"), "Who is told"),
        Field("control", CONTROL, "What may be limited"),
        Field("record", RECORD, "What is recorded"),
    ),
)


def check_across(root: Record, mode: Mode | None) -> None:
    """Report what is wrong between sections; `mode` (from the command line) wins over the file's."""
    known = _server_names(root)
    control = root.get("control")
    if not isinstance(control, Record):
        return
    acting = (mode or control.get("mode", attribute_default(ControlSettings, "mode"))) is Mode.ACT
    tick_s = root.get("tick", attribute_default(Settings, "tick_s"))
    seen: set[str] = set()
    for target in _records(control.get("targets")):
        _check_reference(target, known, seen)
        _check_lease(target, tick_s)
        if acting:
            _check_consent(target)


def _records(value: object) -> list[Record]:
    return [one for one in value if isinstance(one, Record)] if isinstance(value, tuple) else []


def _server_names(root: Record) -> set[str] | None:
    """Every name as written; None when some cannot be read, so that no target is called wrong for it."""
    names: set[str] = set()
    servers = _records(root.get("servers"))
    complete = not root.meant("servers") and len(servers) == _written(root, "servers")
    for server in servers:
        place = server.places.get("name")
        if place is None or not isinstance(place.node, ScalarNode):
            complete = False
            continue
        if server.good("name") and place.node.text in names:
            place.report(f"{quoted(place.node.text)} is the name of an earlier server; names are unique")
        names.add(place.node.text)
    return names if complete else None


def _written(root: Record, key: str) -> int:
    """How many items the file has under a key (-1: it is no list)."""
    if not root.has(key):
        return 0
    node = root.places[key].node
    return len(node.items) if isinstance(node, ListNode) else -1


def _check_reference(target: Record, known: set[str] | None, seen: set[str]) -> None:
    if not target.good("server"):
        return
    server = target.get("server")
    if known is not None and server not in known:
        hint = (
            suggestion(server, sorted(filter(readers.NAME.fullmatch, known))) if known else "there are none"
        )
        target.at("server").report(f"{quoted(server)} is not under `servers`; {hint}")
    elif server in seen:
        target.at("server").report(f"{quoted(server)} has a target already; one per server")
    seen.add(server)


def _check_lease(target: Record, tick_s: Any) -> None:
    lease_s = target.get("lease", attribute_default(TargetSettings, "lease_s"))
    if BAD in (tick_s, lease_s) or lease_s > 2 * tick_s:
        return
    target.at("lease").report(
        f"lease {units.show_duration(lease_s)} must be longer than two ticks "
        f"of {units.show_duration(tick_s)}, or it runs out before it can be renewed"
    )


def _check_consent(target: Record) -> None:
    policy = target.get("policy")
    if policy in NEEDS_CONSENT and target.get("accept_goodput_loss", False) is False:
        target.at("accept_goodput_loss", "policy").report(
            f"policy {policy} in mode act needs `accept_goodput_loss: true`: limiting on KV usage "
            "costs goodput on most loads"
        )
