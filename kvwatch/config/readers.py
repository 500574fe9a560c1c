"""One node to one value: the scalar kinds of the configuration, and lists of them.

A reader raises Reject with what was expected; `Place.value` turns that into a finding at the
right line. Values are quoted in messages only where they cannot be secrets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvwatch.config import units
from kvwatch.config.findings import Findings, Reject, quoted, suggestion
from kvwatch.config.nodes import ListNode, MapNode, Node, ScalarNode


class _Bad:
    """Stands for a value that was refused; the finding is already noted."""

    def __repr__(self) -> str:
        return "BAD"


BAD: Final = _Bad()

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
NAME_RULE = "names are 1 to 63 of a-z 0-9 . _ - and begin with a letter or digit"
GPU_ID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,90}", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Kind(Protocol):
    """What a value may be: a name for the documentation, a reader, and how a default is shown."""

    @property
    def name(self) -> str:
        """The type as the documentation calls it."""
        ...

    def read(self, place: Place) -> Any:
        """The value, or Reject with what was expected."""
        ...

    def show(self, value: Any) -> str:
        """A value as one would write it in the file."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """A node, the path that leads to it, and where findings go."""

    node: Node
    path: str
    findings: Findings

    def child(self, key: str, node: Node) -> Place:
        """The value of a key."""
        return Place(node, f"{self.path}.{key}" if self.path else key, self.findings)

    def item(self, index: int, node: Node) -> Place:
        """An element of a list."""
        return Place(node, f"{self.path}[{index}]", self.findings)

    def report(self, message: str) -> None:
        """Note a mistake here."""
        self.findings.add(self.node.line, self.node.col, self.path or "(yaml)", message)

    def value(self, kind: Kind) -> Any:
        """Read as `kind`; BAD (and a finding) when refused."""
        try:
            return kind.read(self)
        except Reject as error:
            self.report(str(error))
            return BAD


def _what(node: Node) -> str:
    if isinstance(node, MapNode):
        return "a table of keys"
    if isinstance(node, ListNode):
        return "a list"
    return "empty" if isinstance(node, ScalarNode) and node.is_null else "a single value"


def scalar(place: Place, expected: str, *, words: bool = False) -> ScalarNode:
    """The scalar at this place; refuses lists, tables, empty values and what YAML reads as a boolean."""
    node = place.node
    if not isinstance(node, ScalarNode):
        raise Reject(f"is {_what(node)}; expected {expected}")
    if node.is_null:
        raise Reject(f"is empty; expected {expected} (remove the key for the default)")
    if node.is_boolean:
        quote = " (quote it if it is meant as text)" if words else ""
        raise Reject(f"`{node.text}` is read as a boolean; expected {expected}{quote}")
    return node


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A kind read from one scalar's text by `parse`, then held within `low` and `high`."""

    name: str
    parse: Callable[[str], Any]
    expected: str
    display: Callable[[Any], str] = str
    low: float | None = None
    high: float | None = None

    def read(self, place: Place) -> Any:
        """Parse the text and check the bounds."""
        value = self.parse(scalar(place, self.expected).text)
        if self.low is not None and value < self.low:
            raise Reject(f"{self.display(value)} is too small; at least {self.display(self.low)}")
        if self.high is not None and value > self.high:
            raise Reject(f"{self.display(value)} is too large; at most {self.display(self.high)}")
        return value

    def show(self, value: Any) -> str:
        """The value as text."""
        return self.display(value)


def duration(low: float = 0.0, high: float | None = None) -> Scalar:
    """Seconds, written with a unit."""
    return Scalar(
        name="duration",
        parse=units.duration_s,
        expected="a duration like 200ms, 1s, 5m or 1h",
        display=units.show_duration,
        low=low,
        high=high,
    )


def size(low: float = 0) -> Scalar:
    """Bytes, written with a unit."""
    return Scalar(
        name="size",
        parse=units.size_bytes,
        expected="a size like 512MiB or 2GiB",
        display=units.show_size,
        low=low,
    )


def ratio() -> Scalar:
    """0 to 1, or a percentage."""
    return Scalar(
        name="ratio", parse=units.ratio, expected="a ratio like 0.7 or 70%", display=units.show_number
    )


def share() -> Scalar:
    """A ratio that may pass 1."""
    expected = "a factor like 1.5 or 150%"
    return Scalar(name="factor", parse=units.share, expected=expected, display=units.show_number, low=0.0)


def number(name: str, low: float = 0.0, high: float | None = None) -> Scalar:
    """A plain number; `name` says of what."""
    return Scalar(
        name=name, parse=units.number, expected="a number", display=units.show_number, low=low, high=high
    )


def integer(low: int = 0, high: int = 1_000_000) -> Scalar:
    """A whole number."""
    return Scalar(name="whole number", parse=units.integer, expected="a whole number", low=low, high=high)


@dataclass(frozen=True, slots=True)
class Boolean:
    """`true` or `false`, and no other spelling."""

    name: str = "true or false"

    def read(self, place: Place) -> bool:
        """Read it; yes, no, on and off are refused because YAML versions disagree about them."""
        node = place.node
        if not isinstance(node, ScalarNode) or not node.plain or node.text not in ("true", "false"):
            raise Reject("expected true or false")
        return node.text == "true"

    def show(self, value: Any) -> str:
        """YAML's spelling."""
        return "true" if value else "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of a closed set of words; those of `later` are known but not built yet."""

    words: tuple[str, ...]
    later: tuple[str, ...] = ()
    convert: Callable[[str], Any] = str

    @property
    def name(self) -> str:
        """The words themselves."""
        return " \\| ".join(f"`{word}`" for word in self.words)

    def read(self, place: Place) -> Any:
        """The word, converted."""
        node = place.node
        if isinstance(node, ScalarNode) and node.plain and node.text in self.words:
            return self.convert(node.text)
        text = scalar(place, "one of " + ", ".join(self.words)).text
        if text in self.later:
            raise Reject(f"`{text}` is known but not built yet; use one of {', '.join(self.words)}")
        if text not in self.words:
            raise Reject(f"{quoted(text)} is not known; {suggestion(text, self.words)}")
        return self.convert(text)

    def show(self, value: Any) -> str:
        """The word."""
        return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Text that `check` accepts; `check` returns what is wrong, or None. Never quoted in messages."""

    name: str
    expected: str
    check: Callable[[str], str | None] = lambda _text: None
    numbers: bool = False  # whether what looks like a number may stand without quotes

    def read(self, place: Place) -> str:
        """The text as written."""
        node = scalar(place, self.expected, words=True)
        if node.plain and not self.numbers and units.is_number(node.text):
            raise Reject(f"is a number; expected {self.expected} (quote it if it is meant as text)")
        if not node.text.strip():
            raise Reject(f"is empty; expected {self.expected}")
        if _CONTROL.search(node.text):
            raise Reject(f"contains a control character; expected {self.expected}")
        wrong = self.check(node.text)
        if wrong is not None:
            raise Reject(wrong)
        return node.text

    def show(self, value: Any) -> str:
        """The text."""
        return str(value)


def _check_name(text: str) -> str | None:
    return None if NAME.fullmatch(text) else f"{quoted(text)} is not a name; {NAME_RULE}"


def _check_path(text: str) -> str | None:
    if not text.startswith("/"):
        return "is not an absolute path; begin it with /"
    return "is longer than a path may be" if len(text.encode()) > 4095 else None


def _check_socket(text: str) -> str | None:
    long = len(text.encode()) > 107
    return "is longer than the 107 bytes of a unix socket's path" if long else _check_path(text)


def _check_url(text: str) -> str | None:
    from urllib.parse import urlsplit  # only with a server or a hook by URL

    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "is not a URL (bad host or port); write one like http://127.0.0.1:8000"
    if parts.scheme not in ("http", "https"):
        return "is not an http or https URL; write one like http://127.0.0.1:8000"
    if parts.username is not None or parts.password is not None:
        return "carries credentials; put them in files and name those under `auth`"
    if not host or " " in text:
        return "has no valid host; write a URL like http://127.0.0.1:8000"
    if port == 0:
        return "has port 0; ports are 1 to 65535"
    if parts.fragment:
        return "has a #fragment, which is never sent; remove it"
    return None


def _check_server_url(text: str) -> str | None:
    wrong = _check_url(text)
    if wrong is None and "?" in text:
        return "has a query; a server's URL is scheme, host, port and a path prefix"
    if wrong is None and text.rstrip("/").endswith("/metrics"):
        return "ends in /metrics, which kvwatch adds itself; write it without (another path: `metrics_path`)"
    return wrong


name = Text(name="name", expected="a name", check=_check_name, numbers=True)
path = Text(name="absolute path", expected="an absolute path", check=_check_path)
socket_path = Text(name="absolute path", expected="an absolute path", check=_check_socket)
url = Text(name="URL", expected="a URL like http://127.0.0.1:9999/hook", check=_check_url)
server_url = Text(name="URL", expected="a URL like http://127.0.0.1:8000", check=_check_server_url)
listen = Scalar(
    name="host:port",
    parse=units.listen_address,
    expected="host:port like 127.0.0.1:9843",
    display=lambda value: f"{value[0]}:{value[1]}",
)
boolean = Boolean()


def text(expected: str) -> Text:
    """Any text; `expected` says what it is."""
    return Text(name="text", expected=expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOf:
    """A list of one kind. Mistakes in items are findings of their own; duplicates are refused."""

    item: Kind
    expected: str
    empty: bool = False
    repeats: bool = False

    @property
    def name(self) -> str:
        """`list of …`."""
        return f"list of {self.item.name}"

    def read(self, place: Place) -> tuple[Any, ...]:
        """The good items."""
        if not isinstance(place.node, ListNode):
            raise Reject(f"is {_what(place.node)}; expected {self.expected}")
        if not place.node.items and not self.empty:
            raise Reject(f"is an empty list; expected {self.expected}")
        values: list[Any] = []
        for index, node in enumerate(place.node.items):
            here = place.item(index, node)
            value = here.value(self.item)
            if value is BAD:
                continue
            if not self.repeats and value in values:
                here.report("stands in this list twice")
            values.append(value)
        return tuple(values)

    def show(self, value: Any) -> str:
        """A flow sequence."""
        return "[" + ", ".join(self.item.show(one) for one in value) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """A kind with a reader of its own."""

    name: str
    reader: Callable[[Place], Any]
    display: Callable[[Any], str] = str

    def read(self, place: Place) -> Any:
        """Whatever `reader` makes of it."""
        return self.reader(place)

    def show(self, value: Any) -> str:
        """The value as text."""
        return self.display(value)


def not_built(what: str, instead: Iterable[str]) -> Custom:
    """A key that the contract names and that no code answers yet."""
    fix = ", ".join(instead)

    def refuse(_place: Place) -> Any:
        raise Reject(f"`{what}` is known but not built yet; use one of {fix}")

    return Custom(name="later", reader=refuse)


def _read_gpu(place: Place) -> str:
    text = scalar(place, "a GPU index, UUID or UUID prefix").text
    if re.fullmatch(r"0|[1-9]\d{0,2}", text, re.ASCII) or GPU_ID.fullmatch(text):
        return text
    raise Reject(
        f"{quoted(text)} is not a GPU; write its index like 0, or its UUID like GPU-1a2b… (a prefix will do)"
    )


def _read_uuid(place: Place) -> str:
    text = scalar(place, "a UUID like GPU-1a2b…").text
    if GPU_ID.fullmatch(text):
        return text
    raise Reject(f"{quoted(text)} is not a UUID; write one like GPU-1a2b… (a prefix will do)")


gpu = Custom(name="GPU", reader=_read_gpu)
uuid = Custom(name="UUID", reader=_read_uuid)
