"""YAML text to a small tree of nodes that know their line and column.

The tree is built from PyYAML's events, never from constructed objects: so nothing is guessed
(`off` stays the text `off`), no tag can run code, and depth, size and alias expansion are
bounded while reading. The C parser is used where it exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvwatch.config.findings import DOCUMENT, Findings

MAX_DEPTH = 32
MAX_NODES = 20_000  # after aliases are expanded
_TEXT_TAG = "tag:yaml.org,2002:str"
# What YAML allows; a stray control character or half a surrogate pair is found before the parser.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BOOLEANS = frozenset({"true", "false", "yes", "no", "on", "off"})
_NULLS = frozenset({"", "~", "null"})


@dataclass(slots=True)
class Node:
    """Anything in the file; `line` and `col` are 1-based."""

    line: int
    col: int


@dataclass(slots=True)
class ScalarNode(Node):
    """One value as written. `plain` is False for quoted text, which is never a number or boolean."""

    text: str
    plain: bool = True

    @property
    def is_null(self) -> bool:
        """Whether YAML reads this as null (an empty value)."""
        return self.plain and self.text.lower() in _NULLS

    @property
    def is_boolean(self) -> bool:
        """Whether YAML 1.1 reads this as a boolean: also yes, no, on and off."""
        return self.plain and self.text.lower() in _BOOLEANS


@dataclass(slots=True)
class ListNode(Node):
    """A sequence."""

    items: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class MapNode(Node):
    """A mapping, as pairs in the order of the file; duplicates are still there."""

    pairs: list[tuple[Node, Node]] = field(default_factory=list)


class _Stop(Exception):  # noqa: N818 - leaves the composer after a mistake that ends reading
    pass


@dataclass(slots=True)
class _Open:
    """A collection under construction, its anchor, and the nodes in it with aliases expanded."""

    node: ListNode | MapNode
    anchor: str | None
    weight: int = 1
    key: Node | None = None

    def take(self, child: Node) -> None:
        if isinstance(self.node, ListNode):
            self.node.items.append(child)
        elif self.key is None:
            self.key = child
        else:
            self.node.pairs.append((self.key, child))
            self.key = None


class _Composer:
    """Turns one stream of events into one root node."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.root: Node | None = None
        self.documents = 0
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[Node, int]] = {}

    def feed(self, event: Any) -> None:
        """Take the next parser event (the classes have no types, so they are told apart by name)."""
        kind = type(event).__name__
        line, col = event.start_mark.line + 1, event.start_mark.column + 1
        if kind == "DocumentStartEvent":
            self._document(line, col)
        elif kind == "ScalarEvent":
            self._scalar(event, line, col)
        elif kind == "AliasEvent":
            self._alias(event.anchor, line, col)
        elif kind in ("SequenceStartEvent", "MappingStartEvent"):
            self._begin(event, kind, line, col)
        elif kind in ("SequenceEndEvent", "MappingEndEvent"):
            self._end(line, col)

    def _fail(self, line: int, col: int, message: str) -> None:
        self.findings.add(line, col, DOCUMENT, message)
        raise _Stop

    def _document(self, line: int, col: int) -> None:
        self.documents += 1
        if self.documents > 1:
            self._fail(line, col, "a second document starts here; a configuration is one document")

    def _scalar(self, event: Any, line: int, col: int) -> None:
        self._check_tag(event.tag, line, col)
        plain = event.style in (None, "") and event.tag not in ("!", _TEXT_TAG)
        self._add(ScalarNode(line, col, event.value, plain), event.anchor, 1)

    def _alias(self, anchor: str, line: int, col: int) -> None:
        known = self._anchors.get(anchor)
        if known is None:
            self._fail(line, col, "this alias has no anchor before it, or stands inside its own anchor")
        else:
            self._add(known[0], None, known[1], place=(line, col))

    def _begin(self, event: Any, kind: str, line: int, col: int) -> None:
        self._check_tag(event.tag, line, col)
        if len(self._open) >= MAX_DEPTH:
            self._fail(line, col, f"nested more than {MAX_DEPTH} deep")
        node = ListNode(line, col) if kind == "SequenceStartEvent" else MapNode(line, col)
        self._open.append(_Open(node, event.anchor))

    def _end(self, line: int, col: int) -> None:
        done = self._open.pop()
        self._add(done.node, done.anchor, done.weight, place=(line, col))

    def _add(self, node: Node, anchor: str | None, weight: int, place: tuple[int, int] | None = None) -> None:
        if anchor is not None:
            self._anchors[anchor] = (node, weight)
        if not self._open:
            self.root = node
            return
        top = self._open[-1]
        top.take(node)
        top.weight += weight
        if top.weight > MAX_NODES:
            self._fail(*(place or (node.line, node.col)), f"more than {MAX_NODES} values, aliases expanded")

    def _check_tag(self, tag: str | None, line: int, col: int) -> None:
        if tag not in (None, "!", _TEXT_TAG):
            self.findings.add(line, col, DOCUMENT, "YAML tags (`!…`) are not supported; write a plain value")


def _events(text: str) -> Iterator[Any]:
    import yaml  # 11 MiB: only when there is a file

    return iter(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def _syntax_hint(text: str, line: int, col: int) -> str:
    """What usually stands behind a syntax error at this character."""
    lines = text.split("\n")
    char = lines[line - 1][col - 1 : col] if line <= len(lines) else ""
    if char == "\t":
        return "; this is a tab: indent with spaces"
    return "; quote a value that begins with @ ` or %" if char in ("@", "`", "%") else ""


def _syntax_error(error: Exception, text: str, findings: Findings) -> None:
    """One finding for what the parser could not read. Only its fixed phrases are shown, never the text."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line, col = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    problem = str(getattr(error, "problem", None) or "not readable as YAML")
    if "alias" in problem:
        problem = "alias without an anchor"
    if "cannot start any token" in problem:
        problem += _syntax_hint(text, line, col)
    context = getattr(error, "context_mark", None)
    if context is not None and "unexpected end" in problem and "quoted" in str(error):
        line, col = context.line + 1, context.column + 1
        problem += "; the quote that begins here has no end"
    if "mapping values are not allowed" in problem:
        problem += "; quote a value that contains `: `"
    findings.add(line, col, DOCUMENT, f"syntax: {problem}")


def compose(text: str, findings: Findings) -> Node | None:
    """The root node, or None for an empty file; mistakes go to `findings`."""
    odd = _UNPRINTABLE.search(text)
    if odd is not None:
        before = text[: odd.start()].split("\n")
        message = f"character U+{ord(odd.group()):04X} is not allowed in YAML"
        findings.add(len(before), len(before[-1]) + 1, DOCUMENT, message)
        return None
    from yaml import YAMLError

    composer = _Composer(findings)
    try:
        for event in _events(text):
            composer.feed(event)
    except _Stop:
        return None
    except (YAMLError, ValueError, OverflowError) as error:  # PyYAML's own scanner leaks the last two
        _syntax_error(error, text, findings)
        return None
    return composer.root
