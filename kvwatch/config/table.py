"""Tables of keys: the rows that say what may stand in the file, and the walk that reads by them.

Reading has two steps, so that one mistake never causes a second finding: first every value is
read and checked into a `Record`; only when there are no findings are the settings built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvwatch.config.findings import Reject, nearest, quoted, suggestion
from kvwatch.config.nodes import ListNode, MapNode, Node, ScalarNode
from kvwatch.config.readers import BAD, Kind, ListOf, Place

COMMON_SLIPS = ("bearer", "token", "password", "username", "pass", "key", "secret", "hmac", "headers")
NONE = object()  # an attribute without a default


@dataclass(frozen=True, slots=True)
class Field:
    """One key: what it may be, where its value goes, and one line of documentation.

    `default` is shown in the documentation where the attribute's own default does not tell.
    """

    key: str
    kind: Kind
    help: str
    attr: str = ""  # the settings' attribute; the key itself when empty
    required: bool = False
    default: str | None = None

    @property
    def target(self) -> str:
        """The attribute that takes the value."""
        return self.attr or self.key


def _nothing(_record: Record) -> None:
    """No checks across keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A mapping with known keys, read into a Record and built by `build` (a dataclass, usually)."""

    title: str
    fields: tuple[Field, ...]
    build: Callable[..., Any]
    check: Callable[[Record], None] = _nothing
    help: str = ""
    name: str = "table"
    secret: bool = False  # unknown keys are not shown unless they are near misses

    def read(self, place: Place) -> Record:
        """Read every key, report what is wrong, then check across keys."""
        node = place.node
        if isinstance(node, ScalarNode) and node.is_null:
            node = MapNode(node.line, node.col)  # `key:` with nothing under it: all defaults
        if not isinstance(node, MapNode):
            raise Reject(self._not_a_table(node))
        record = Record(self, place)
        self._read_pairs(node, record)
        for one in self.fields:
            if one.required and not record.has(one.key) and not record.meant(one.key):
                here = place.child(one.key, node)
                here.report(f"missing; add `{one.key}`: {one.help[:1].lower()}{one.help[1:]}")
        self.check(record)
        return record

    def show(self, _value: Any) -> str:
        """Tables are documented by their own rows."""
        return ""

    @property
    def keys(self) -> list[str]:
        """The keys that work today."""
        return [one.key for one in self.fields if one.kind.name != "later"]

    def _not_a_table(self, node: Node) -> str:
        shape = "a list" if isinstance(node, ListNode) else "a single value"
        wanted = f"is {shape}; expected a table with keys of {', '.join(self.keys)}"
        if not isinstance(node, ScalarNode):
            return wanted
        if node.is_boolean and "enabled" in self.keys:
            return f"{wanted}; to switch it off write {{enabled: false}}"
        return f"{wanted}; write {{{node.text}: …}}" if node.text in self.keys else wanted

    def _read_pairs(self, node: MapNode, record: Record) -> None:
        known = {one.key: one for one in self.fields}
        for key_node, value_node in node.pairs:
            if not isinstance(key_node, ScalarNode):
                dataclasses.replace(record.place, node=key_node).report("a key must be a word")
                continue
            key = key_node.text
            at_key = record.place.child(self._shown(key), key_node)
            if key not in known:
                record.unknown.append(key)
                at_key.report(self._unknown(key))
            elif key in record.places:
                at_key.report(f"stands here twice; the first is on line {record.key_lines[key]}")
            else:
                record.places[key] = here = record.place.child(key, value_node)
                record.key_lines[key] = key_node.line
                record.values[key] = here.value(known[key].kind)

    def _shown(self, key: str) -> str:
        """The key for a path; hidden where it may be a secret written in the wrong place."""
        if self.secret and key not in COMMON_SLIPS and nearest(key, self.keys) is None:
            return "…"
        return quoted(key)[1:-1]

    def _unknown(self, key: str) -> str:
        if key == "<<":
            return "merge keys are not supported; write the keys out"
        return f"unknown key; {suggestion(key, self.keys)}"


@dataclass(slots=True)
class Record:
    """What was read of one table: values by key (BAD where refused) and their places."""

    table: Table
    place: Place
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    key_lines: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def has(self, key: str) -> bool:
        """Whether the key was given, good or bad."""
        return key in self.places

    def meant(self, key: str) -> bool:
        """Whether an unknown key is a near miss of this one, so that it is not missing besides."""
        return any(nearest(unknown, self.table.keys) == key for unknown in self.unknown)

    def get(self, key: str, default: Any = None) -> Any:
        """The value; `default` when not given; BAD when given and refused."""
        return self.values.get(key, default)

    def good(self, *keys: str) -> bool:
        """Whether every one of these keys was given and is good."""
        return all(self.values.get(key, BAD) is not BAD for key in keys)

    def sound(self, *keys: str) -> bool:
        """Whether none of these keys was given and refused."""
        return all(self.values.get(key) is not BAD for key in keys)

    def at(self, *keys: str) -> Place:
        """The place of the first of these keys that was given, else of the table."""
        return next((self.places[key] for key in keys if key in self.places), self.place)

    def build(self) -> Any:
        """The settings. Only after reading ended without findings."""
        targets = {one.key: one.target for one in self.table.fields}
        return self.table.build(**{targets[key]: built(value) for key, value in self.values.items()})


def built(value: Any) -> Any:
    """Replace Records by what they build, also inside tuples."""
    if isinstance(value, Record):
        return value.build()
    if isinstance(value, tuple):
        return tuple(built(one) for one in value)
    return value


def attribute_default(cls: Any, attr: str) -> Any:
    """The default of a dataclass attribute, or NONE."""
    for one in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if one.name == attr:
            if one.default_factory is not dataclasses.MISSING:
                return one.default_factory()
            return NONE if one.default is dataclasses.MISSING else one.default
    return NONE


def one_of(record: Record, keys: tuple[str, ...], what: str, later: tuple[str, ...] = ()) -> None:
    """Report unless exactly one of these keys was given; an unknown key stands for the missing one."""
    given = [key for key in (*keys, *later) if record.has(key)]
    if len(given) == 1 or (not given and record.unknown):
        return
    found = "none is given" if not given else f"{' and '.join(given)} are given"
    record.place.report(f"{what} needs exactly one of {', '.join(keys)}; {found}")


def list_of_tables(table: Table, expected: str) -> ListOf:
    """A list whose items are tables; an empty list is allowed, equal tables too."""
    return ListOf(item=table, expected=expected, empty=True, repeats=True)
