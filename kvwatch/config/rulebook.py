"""What may be said about each rule: the unit of its thresholds, which levels it has, which way is worse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvwatch.config import readers
from kvwatch.config.findings import Reject
from kvwatch.config.nodes import ScalarNode
from kvwatch.config.readers import Choice, Custom, Kind, Place
from kvwatch.config.table import Field, Record, Table
from kvwatch.model.level import RuleId
from kvwatch.model.settings import OnStale, RuleSettings

NEVER = "never"


@dataclass(frozen=True, slots=True)
class RuleShape:
    """How a rule's thresholds are written. `unit` None: it has no thresholds at all."""

    unit: Kind | None = None
    worse: Literal["above", "below"] = "above"
    red: bool = True


_RATIO = readers.ratio()
_PER_MINUTE = readers.number("count per minute")
SHAPES: Mapping[RuleId, RuleShape] = {
    RuleId.KV_USAGE: RuleShape(_RATIO),
    RuleId.RECOMPUTE_TAX: RuleShape(_RATIO),
    RuleId.LATENCY_SLO: RuleShape(readers.share()),
    RuleId.DEVICE_HEADROOM: RuleShape(readers.size(), "below"),
    RuleId.DEVICE_EXHAUSTION: RuleShape(readers.duration(), "below"),
    RuleId.ALLOC_RETRIES: RuleShape(_PER_MINUTE),
    RuleId.LARGEST_ALLOCATABLE: RuleShape(readers.size(), "below"),
    RuleId.ALLOCATOR_FRAGMENTATION: RuleShape(_RATIO, red=False),
    RuleId.KV_BLOCK_WASTE: RuleShape(_RATIO, red=False),
    RuleId.DEAD_PROCESS_MEMORY: RuleShape(readers.size(), red=False),
    RuleId.SERVER_STALLED: RuleShape(),
    RuleId.SERVER_DOWN: RuleShape(),
    RuleId.GPU_LOST: RuleShape(),
    RuleId.GPU_MISSING: RuleShape(),
    RuleId.GPU_XID: RuleShape(),
    RuleId.SOURCE_STALE: RuleShape(readers.number("count of periods", low=1.0), red=False),
}


def shipped() -> Mapping[RuleId, RuleSettings]:
    """The defaults of every rule, from the room that owns them."""
    from kvwatch.rules.shipped import DEFAULTS  # late: the units of this room are useful without it

    return DEFAULTS


def _threshold(unit: Kind) -> Custom:
    def read(place: Place) -> Any:
        if isinstance(place.node, ScalarNode) and place.node.text == NEVER:
            return None
        return unit.read(place)

    return Custom(name=f"{unit.name} or `{NEVER}`", reader=read, display=lambda value: show(unit, value))


def show(unit: Kind | None, value: float | None) -> str:
    """A threshold as one would write it."""
    return NEVER if value is None or unit is None else unit.show(value)


def _refuse(message: str) -> Custom:
    def read(_place: Place) -> Any:
        raise Reject(message)

    return Custom(name="later", reader=read)


_duration = readers.duration(0.0, 24 * 3600.0)
COMMON = (
    Field("enabled", readers.boolean, "Whether the rule is judged at all"),
    Field("for", _duration, "How long a worse level must last before it shows", attr="for_s"),
    Field("hold", _duration, "How long a better level must last before it shows", attr="hold_s"),
    Field(
        "on_stale",
        Choice(words=tuple(OnStale), convert=OnStale),
        "What stale input makes of the level: hold it for 3 periods, unknown, or red; never green",
    ),
)


def rule_fields(rule: RuleId) -> tuple[Field, ...]:
    """The keys of one rule."""
    return _threshold_fields(rule, SHAPES[rule]) + COMMON


def _threshold_fields(rule: RuleId, shape: RuleShape) -> tuple[Field, ...]:
    if shape.unit is None:
        none = _refuse(f"{rule} has no thresholds; it is red or not (set `enabled: false` to switch it off)")
        return tuple(Field(key, none, "") for key in ("yellow", "red", "clear"))
    kind = _threshold(shape.unit)
    red: Kind = kind if shape.red else _refuse(f"{rule} has no red level; set `yellow`")
    return (
        Field("yellow", kind, "Threshold of yellow"),
        Field("red", red, "Threshold of red"),
        Field(
            "clear",
            shape.unit,
            "Margin by which a value must recover before the level falls",
            default="0.02 of a ratio, 5 % of the threshold in other units",
        ),
    )


def _check(record: Record, rule: RuleId, shape: RuleShape) -> None:
    if record.get("on_stale") is OnStale.RED and not shape.red:
        record.at("on_stale").report(f"{rule} has no red level; use hold or unknown")
    if shape.unit is None or not record.sound("yellow", "red", "clear"):
        return
    if not any(record.has(key) for key in ("yellow", "red", "clear")):
        return
    default = shipped()[rule]
    yellow, red = record.get("yellow", default.yellow), record.get("red", default.red)
    _check_order(record, shape, yellow, red)
    clear, lowest = record.get("clear"), min((one for one in (yellow, red) if one is not None), default=0.0)
    if clear is not None and shape.worse == "above" and 0 < lowest <= clear:
        record.at("clear").report(
            f"{shape.unit.show(clear)} is not smaller than the threshold {shape.unit.show(lowest)}; "
            "the level could never fall"
        )


def _check_order(record: Record, shape: RuleShape, yellow: float | None, red: float | None) -> None:
    if yellow is None or red is None or shape.unit is None:
        return
    if (yellow < red) if shape.worse == "above" else (yellow > red):
        return
    relation = "below" if shape.worse == "above" else "above"
    shown_red = show(shape.unit, red) + ("" if record.has("red") else " (the default)")
    shown_yellow = show(shape.unit, yellow) + ("" if record.has("yellow") else " (the default)")
    record.at("yellow", "red").report(
        f"yellow {shown_yellow} must be {relation} red {shown_red}: yellow comes first"
    )


def _rule_table(rule: RuleId, shape: RuleShape) -> Table:
    return Table(
        title=f"rules.{rule}",
        fields=rule_fields(rule),
        build=dict,
        check=lambda record: _check(record, rule, shape),
    )


def _overlay(**changes: dict[str, Any]) -> dict[RuleId, RuleSettings]:
    return {rule: replace(default, **changes.get(rule.value, {})) for rule, default in shipped().items()}


RULES = Table(
    title="rules",
    help="Thresholds and timing by rule; what is not given keeps its default.",
    build=_overlay,
    fields=tuple(
        Field(rule.value, _rule_table(rule, SHAPES[rule]), "Thresholds and timing") for rule in RuleId
    ),
)


def _read_rule_name(place: Place) -> str:
    text = readers.scalar(place, 'a rule, or "*"').text
    return text if text == "*" else str(Choice(words=tuple(RuleId)).read(place))


rule_name = Custom(name='rule or `"*"`', reader=_read_rule_name)
