"""docs/config.md, made from the same tables that read the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvwatch.config import acting, rulebook, schema, watching
from kvwatch.config.readers import ListOf
from kvwatch.config.table import NONE, Field, Table, attribute_default
from kvwatch.model.level import RuleId
from kvwatch.model.settings import (
    ControlSettings,
    GpuSettings,
    RecordSettings,
    RuleSettings,
    ServerSettings,
    Settings,
    TargetSettings,
    TlsSettings,
    WebSettings,
)

# Where the defaults of a table's keys stand. Tables that are not here say theirs in the row.
_OWNERS: dict[str, type] = {
    schema.ROOT.title: Settings,
    schema.WEB.title: WebSettings,
    schema.RECORD.title: RecordSettings,
    watching.GPUS.title: GpuSettings,
    watching.SERVER.title: ServerSettings,
    watching.TLS.title: TlsSettings,
    acting.CONTROL.title: ControlSettings,
    acting.TARGET.title: TargetSettings,
}
_INTRO = """\
# Configuration

The file is YAML, by default `/etc/kvwatch/kvwatch.yml`. `kvwatch check FILE` prints every mistake as
`FILE:line:col: path: message`, also those in `web.config_file`, and nothing when all is good. A file of
comments alone means all defaults; an empty one is a mistake, as an editor leaves it for a moment while it
saves. Without a file kvwatch watches what it finds ([install.md](install.md)).

* Durations have a unit: `200ms`, `1s`, `5m`, `1h`, `1m30s`. Sizes too: `512MiB`, `2GiB`, `80GB`. Ratios
  are `0.7` or `70%`. A plain number where a unit is needed is a mistake.
* Names are 1 to 63 of `a-z 0-9 . _ -` and begin with a letter or a digit.
* Unknown keys, keys that stand twice, and words that YAML reads as a boolean (`off`, `on`, `yes`, `no`)
  are mistakes. Booleans are `true` and `false`.
* Secrets never stand in the file, only the paths of files that hold them.
* Anchors and aliases work; tags, merge keys (`<<`) and several documents do not.

This page is generated (`kvwatch gen`) from the tables that read the file. A commented example is
`packaging/kvwatch.yml`.
"""


def render() -> str:
    """The whole page."""
    parts = [_INTRO, *(_section(table) for table in _inside(schema.ROOT))]
    parts.append(_rules())
    parts.extend(_section(table) for table in acting.POLICIES.values())
    return "\n".join(parts)


def tables() -> tuple[Table, ...]:
    """Every table that has a section on the page, except the single rules."""
    return (*_inside(schema.ROOT), *acting.POLICIES.values())


def _inside(table: Table, seen: set[int] | None = None) -> Iterator[Table]:
    """A table and those inside it, each once; rules have a section of their own."""
    seen = set() if seen is None else seen
    if id(table) in seen or table is rulebook.RULES:
        return
    seen.add(id(table))
    yield table
    for field in table.fields:
        kind = field.kind.item if isinstance(field.kind, ListOf) else field.kind
        if isinstance(kind, Table):
            yield from _inside(kind, seen)


def _section(table: Table) -> str:
    lines = [f"## `{table.title}`" if table is not schema.ROOT else "## Top level", ""]
    if table.help:
        lines += [table.help, ""]
    if table.fields:
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(table, field) for field in table.fields if field.kind.name != "later"]
        lines.append("")
    later = [f"`{field.key}`" for field in table.fields if field.kind.name == "later"]
    if later:
        lines += [f"Known, not built yet: {', '.join(later)}.", ""]
    return "\n".join(lines)


def _row(table: Table, field: Field) -> str:
    return f"| `{field.key}` | {field.kind.name} | {_default(table, field)} | {field.help} |"


def _default(table: Table, field: Field) -> str:
    if field.required:
        return "required"
    if field.default is not None:
        return field.default
    if isinstance(field.kind, Table):
        return ""
    value = attribute_default(_OWNERS.get(table.title), field.target)
    return _shown(field, value)


def _shown(field: Field, value: Any) -> str:
    if value is NONE or value is None or value == ():
        return "none"
    return f"`{field.kind.show(value)}`"


def _rules() -> str:
    where = "Where the numbers come from: [rules.md](rules.md)."
    lines = ["## `rules`", "", f"{rulebook.RULES.help} {where}", ""]
    lines += ["| rule | thresholds | worse | yellow | red | other defaults |", "|---|---|---|---|---|---|"]
    lines += [_rule_row(rule) for rule in RuleId]
    lines += ["", "Keys of every rule:", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    example = rulebook.rule_fields(RuleId.KV_USAGE)
    for field in example:
        default = _rule_default(field)
        kind = "as above" if field.key in ("yellow", "red", "clear") else field.kind.name
        lines.append(f"| `{field.key}` | {kind} | {default} | {field.help} |")
    lines += [
        "",
        f"`{rulebook.NEVER}` as a threshold means that the rule never reaches that level.",
        "",
    ]
    return "\n".join(lines)


def _rule_default(field: Field) -> str:
    if field.key in ("yellow", "red"):
        return "by rule"
    if field.default is not None:
        return field.default
    return _shown(field, attribute_default(RuleSettings, field.target))


def _rule_row(rule: RuleId) -> str:
    shape, default = rulebook.SHAPES[rule], rulebook.shipped()[rule]
    if shape.unit is None:
        cells = ["none", "", "", "yes"]
    else:
        red = rulebook.show(shape.unit, default.red) if shape.red else "–"
        cells = [shape.unit.name, shape.worse, rulebook.show(shape.unit, default.yellow), red]
    others = [
        f"`{field.key}: {field.kind.show(getattr(default, field.target))}`"
        for field in rulebook.COMMON
        if getattr(default, field.target) != attribute_default(RuleSettings, field.target)
    ]
    return f"| `{rule}` | " + " | ".join(cells) + f" | {', '.join(others)} |"
