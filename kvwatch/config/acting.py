"""What may be said about acting: notifications, control targets, policies and levers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvwatch.config import readers, units
from kvwatch.config.findings import Reject, quoted
from kvwatch.config.nodes import ListNode, MapNode, ScalarNode
from kvwatch.config.readers import BAD, Choice, Custom, ListOf, Place
from kvwatch.config.rulebook import rule_name
from kvwatch.config.table import Field, Record, Table, attribute_default, list_of_tables, one_of
from kvwatch.model.settings import (
    ActionSettings,
    ControlSettings,
    Mode,
    NotifySettings,
    TargetSettings,
)

ACTIONS = ("lease", "exec", "http", "sglang")
LATER_ACTIONS = ("vllm", "haproxy", "dynamo")
LATER_POLICIES = ("schedule", "aimd", "token_budget", "slo_directed")
NEEDS_CONSENT = ("threshold", "aimd")  # policies that give up goodput: `act` needs a yes to that
EVENTS = ("red", "yellow", "green", "restore")
DEADLINE_S = 5.0
MAX_LEASE_S = 120.0  # a reader honours no longer lease


def _read_argv(place: Place) -> tuple[str, ...]:
    if not isinstance(place.node, ListNode):
        raise Reject("is not a list; write [/path/to/program, argument, …]: it is never given to a shell")
    if not place.node.items:
        raise Reject("is an empty list; write [/path/to/program, argument, …]")
    words = tuple(
        place.item(index, node).value(_program if index == 0 else _argument)
        for index, node in enumerate(place.node.items)
    )
    return tuple(word for word in words if word is not BAD)


def _read_argument(place: Place) -> str:
    node = place.node
    if isinstance(node, ScalarNode) and not node.plain and not node.text:
        return ""  # an empty argument, written ""
    text = readers.scalar(place, "an argument as text", words=True).text
    if "\0" in text:
        raise Reject("contains a NUL character, which no argument can")
    return text


_program = dataclasses.replace(readers.path, expected="the program's absolute path")
_argument = Custom(name="text", reader=_read_argument)
_deadline = Field(
    "deadline",
    readers.duration(0.1, 60.0),
    "How long it may take; then it is ended and counts as timed out",
    attr="deadline_s",
    default="`5s`",
)


def _action(kind: str) -> Any:
    def build(**params: Any) -> ActionSettings:
        return ActionSettings(kind=kind, params={"deadline_s": DEADLINE_S, **params})

    return build


LEASE = Table(
    title="lease",
    help="A limit file that the agent in the server reads. No keys: write `{lease: {}}`.",
    build=lambda: ActionSettings(kind="lease"),
    fields=(),
)
EXEC = Table(
    title="exec",
    help="Run a program, never through a shell; the request is JSON on stdin, with KVWATCH_* variables.",
    build=_action("exec"),
    fields=(
        Field(
            "argv",
            Custom(name="list of text", reader=_read_argv),
            "The program's absolute path, then its arguments",
            required=True,
        ),
        _deadline,
    ),
)
HTTP = Table(
    title="http",
    secret=True,
    help="POST the request as JSON; 2xx means applied; redirects are not followed.",
    build=_action("http"),
    fields=(
        Field("url", readers.url, "Where to post", required=True),
        Field(
            "key_file",
            readers.path,
            "File with the HMAC key; the body is signed in `X-Kvwatch-Signature`",
            default="not signed",
        ),
        Field("ca_file", readers.path, "Certificates to trust for https", default="the system's"),
        _deadline,
    ),
)
SGLANG = Table(
    title="sglang",
    help="SGLang's `/set_internal_state`, with the value read back; it cannot stop admission altogether.",
    build=_action("sglang"),
    fields=(
        Field("url", readers.url, "The server's address", required=True),
        Field(
            "bearer_file", readers.path, "File with the admin key, where one is set", default="no key is sent"
        ),
        Field("ca_file", readers.path, "Certificates to trust for https", default="the system's"),
        _deadline,
    ),
)
_LATER = tuple(
    Field(kind, readers.not_built(kind, ACTIONS), "Known, not built yet") for kind in LATER_ACTIONS
)


def _build_via(**given: ActionSettings) -> ActionSettings:
    return next(iter(given.values()))


VIA = Table(
    title="control.targets[].via[]",
    help="One lever per item; the first that works is used.",
    build=_build_via,
    check=lambda record: one_of(record, ACTIONS, "a lever", LATER_ACTIONS),
    fields=(
        Field("lease", LEASE, "The limit file"),
        Field("exec", EXEC, "A program"),
        Field("http", HTTP, "A web hook"),
        Field("sglang", SGLANG, "SGLang's own knob"),
        *_LATER,
    ),
)


def _build_notify(
    on: tuple[str, ...], rules: tuple[str, ...] = ("*",), **action: ActionSettings
) -> NotifySettings:
    return NotifySettings(on=on, rules=rules, action=_build_via(**action))


NOTIFY = Table(
    title="notify[]",
    help="What to run or call when a rule changes its level, in every mode. Exactly one of exec and http.",
    build=_build_notify,
    check=lambda record: one_of(record, ("exec", "http"), "a notification"),
    fields=(
        Field(
            "on",
            ListOf(item=Choice(words=EVENTS), expected="a list like [red, restore]"),
            "Levels a rule changes to, and `restore` for limits given back",
            required=True,
        ),
        Field(
            "rules",
            ListOf(item=rule_name, expected='a list of rules, or ["*"]'),
            "Rules it is about",
            default='`["*"]`: all',
        ),
        Field("exec", EXEC, "A program to run"),
        Field("http", HTTP, "A URL to call"),
    ),
)


def _check_threshold(record: Record) -> None:
    if not record.sound("shrink_above", "regrow_below"):
        return
    above, below = record.get("shrink_above", 0.95), record.get("regrow_below", 0.80)
    if below >= above:
        record.at("regrow_below", "shrink_above").report(
            f"regrow_below {units.show_number(below)} must be under shrink_above {units.show_number(above)}"
        )


def _read_factor(place: Place) -> float:
    value: float = readers.ratio().read(place)
    if not 0.0 < value < 1.0:
        raise Reject(f"{units.show_number(value)} shrinks nothing or everything; write one between, like 0.8")
    return value


def _build_threshold(**given: float) -> dict[str, float]:
    return {"shrink_above": 0.95, "regrow_below": 0.80, "factor": 0.8, **given}


POLICIES: Mapping[str, Table] = {
    "fixed": Table(
        title="policy fixed",
        help="Always the same limit.",
        build=dict,
        fields=(Field("max_running", readers.integer(1), "Requests that may run", required=True),),
    ),
    "threshold": Table(
        title="policy threshold",
        help="Shrink while the pool is full and requests wait, regrow when it has emptied.",
        build=_build_threshold,
        check=_check_threshold,
        fields=(
            Field("shrink_above", readers.ratio(), "KV usage at which it shrinks", default="`0.95`"),
            Field("regrow_below", readers.ratio(), "KV usage at which it regrows", default="`0.8`"),
            Field(
                "factor",
                Custom(name="ratio", reader=_read_factor),
                "A shrink sets this share of what runs, never under the floor",
                default="`0.8`",
            ),
        ),
    ),
}


def _read_params(place: Place) -> Place:
    """Keep the place: which keys are known depends on the policy."""
    if isinstance(place.node, ScalarNode) and place.node.is_null:
        return dataclasses.replace(place, node=MapNode(place.node.line, place.node.col))
    if not isinstance(place.node, MapNode):
        raise Reject("is not a table; write the policy's keys, like {max_running: 24}")
    return place


def _read_ceiling(place: Place) -> int | None:
    text = readers.scalar(place, "a whole number or auto").text
    if text == "auto":
        return None
    if not units.is_number(text):
        raise Reject(
            f"{quoted(text)} is not a ceiling; write a whole number, or auto for the server's own limit"
        )
    ceiling: int = readers.integer(1).read(place)
    return ceiling


def _check_target(record: Record) -> None:
    if record.good("policy") and record.sound("params"):
        empty = record.place.child("params", MapNode(record.place.node.line, record.place.node.col))
        place = record.get("params", empty)
        record.values["params"] = POLICIES[record.get("policy")].read(place)
    _check_bounds(record)
    _check_deadlines(record)
    _check_compact(record)


def _check_compact(record: Record) -> None:
    levers = record.get("via", ())
    if record.get("compact") is not True or not isinstance(levers, tuple) or not levers:
        return
    if not any(isinstance(lever, Record) and lever.has("lease") for lever in levers):
        record.at("compact").report("no lever tells the server's agent; add {lease: {}} to `via`")


def _check_bounds(record: Record) -> None:
    floor, ceiling = record.get("floor"), record.get("ceiling")
    if isinstance(floor, int) and isinstance(ceiling, int) and floor > ceiling:
        record.at("floor").report(f"floor {floor} is above the ceiling {ceiling}")
        return
    params = record.get("params")
    fixed = params.get("max_running") if isinstance(params, Record) else None
    if not isinstance(fixed, int) or not isinstance(params, Record):
        return
    if isinstance(floor, int) and fixed < floor:
        params.at("max_running").report(f"{fixed} is below the floor {floor}")
    if isinstance(ceiling, int) and fixed > ceiling:
        params.at("max_running").report(f"{fixed} is above the ceiling {ceiling}")


def _check_deadlines(record: Record) -> None:
    lease_s = record.get("lease", attribute_default(TargetSettings, "lease_s"))
    levers = record.get("via", ())
    if lease_s is BAD or not isinstance(levers, tuple):
        return
    actions = [action for lever in levers for action in lever.values.values() if isinstance(action, Record)]
    for action in actions:
        deadline_s = action.get("deadline", DEADLINE_S)
        if action.table is not LEASE and deadline_s is not BAD and deadline_s >= lease_s:
            shown, lease = units.show_duration(deadline_s), units.show_duration(lease_s)
            action.at("deadline").report(f"deadline {shown} is not shorter than the lease, {lease}")


def _build_target(**given: Any) -> TargetSettings:
    """Floors that were not written give way to smaller limits that were."""
    if "floor" not in given:
        caps = (given.get("ceiling"), given["params"].get("max_running"))
        floor = attribute_default(TargetSettings, "floor")
        given["floor"] = min([floor, *(cap for cap in caps if cap is not None)])
    return TargetSettings(**given)


TARGET = Table(
    title="control.targets[]",
    help="One server that may be limited. Limits are per engine.",
    build=_build_target,
    check=_check_target,
    fields=(
        Field("server", readers.name, "Name of a server under `servers`", required=True),
        Field(
            "policy",
            Choice(words=tuple(POLICIES), later=LATER_POLICIES),
            "How limits are found",
            required=True,
        ),
        Field("params", Custom(name="table", reader=_read_params), "The policy's own keys, below"),
        Field(
            "accept_goodput_loss",
            readers.boolean,
            "Consent: limiting on KV usage costs goodput on most loads; `threshold` refuses `act` without",
        ),
        Field("floor", readers.integer(1), "Never fewer running requests than this"),
        Field(
            "ceiling",
            Custom(name="whole number or `auto`", reader=_read_ceiling),
            "Never more than this; `auto` is the server's own limit, refused in act where it does not tell",
            default="`auto`",
        ),
        Field(
            "lease",
            readers.duration(1.0, MAX_LEASE_S),
            "How long a limit stands without being renewed; more than two ticks",
            attr="lease_s",
        ),
        Field("cooldown", readers.duration(0.0, 3600.0), "Least time between moves", attr="cooldown_s"),
        Field("max_moves", readers.integer(1, 1000), "Most moves within `moves_window`"),
        Field(
            "moves_window",
            readers.duration(1.0, 24 * 3600.0),
            "Window of `max_moves`",
            attr="moves_window_s",
        ),
        Field(
            "via",
            ListOf(item=VIA, expected="a list like [{lease: {}}]", repeats=True),
            "Levers; the first that works is used",
            default="`[{lease: {}}]`",
        ),
        Field(
            "compact",
            readers.boolean,
            "When the device runs short, have the agent in the server return unused allocator memory: it "
            "waits for the device once a minute at most; needs the lever `lease`",
        ),
    ),
)
CONTROL = Table(
    title="control",
    help="Whether kvwatch may ask servers to take fewer requests.",
    build=ControlSettings,
    fields=(
        Field(
            "mode",
            Choice(words=tuple(Mode), convert=Mode),
            "Only watch; decide and log, apply nothing; or act",
        ),
        Field("targets", list_of_tables(TARGET, "a list of targets"), "Servers that may be limited"),
    ),
)
