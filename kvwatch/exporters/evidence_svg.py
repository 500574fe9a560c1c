"""How do curves, levels and memory look without a script? Inline SVG, coloured by the style sheet alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 600.0, 90.0
LEVELS = {-1: "unknown", 0: "green", 1: "yellow", 2: "red"}
_GAP_S = 5.0  # rows further apart than this are not joined

Values = Sequence[float | None]
Place = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """How one figure is drawn: its title, its unit, and whether its scale begins at zero."""

    title: str
    unit: str
    from_zero: bool = True


def escape(text: object) -> str:
    """Text as it may stand in HTML, in elements and in quoted attributes."""
    made = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return made.replace('"', "&quot;").replace("'", "&#39;")


def shown(unit: str, value: float | None) -> str:
    """A number for people."""
    if value is None:
        return "unknown"
    if unit == "ratio":
        return f"{100 * value:.1f} %" if abs(value) < 0.1 else f"{100 * value:.0f} %"
    if unit == "bytes":
        return size(value)
    if unit == "seconds":
        return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min"
    return f"{value:.3g}" + {"times": " ×", "per_minute": " /min", "per_second": " /s"}.get(unit, "")


def size(value: float) -> str:
    """Bytes for people."""
    number, units = abs(value), ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    text = f"{number:.0f}" if number >= 100 or units[0] == "B" else f"{number:.1f}"
    return f"{'−' if value < 0 else ''}{text} {units[0]}"


def curve(
    t_s: Sequence[float], values: Values, figure: Figure, lines: Iterable[tuple[str, float]] = ()
) -> str:
    """One figure over time with the moment of red and thresholds (level, value); "" with under two points."""
    points = [(at_s, v) for at_s, v in zip(t_s, values, strict=False) if v is not None]
    if len(points) < 2:
        return ""
    numbers = [v for _, v in points]
    thresholds = [(level, v) for level, v in lines if v <= 4 * max(numbers)]
    low, high = _range(numbers, [v for _, v in thresholds], figure)
    first_s, last_s = t_s[0], t_s[-1]

    def across(at_s: float) -> float:
        return WIDTH * (at_s - first_s) / ((last_s - first_s) or 1.0)

    def up(value: float) -> float:
        return HEIGHT - HEIGHT * (value - low) / (high - low)

    moment = min(WIDTH, across(0.0))
    drawn = [f'<path class="line" d="{_path(points, across, up)}"/>']
    drawn += [
        f'<path class="at {level}" d="M0 {up(v):.1f}H{WIDTH:.0f}"><title>{level} at '
        f"{escape(shown(figure.unit, v))}</title></path>"
        for level, v in thresholds
    ]
    drawn.append(f'<path class="moment" d="M{moment:.1f} 0V{HEIGHT:.0f}"/>')
    last = next((v for at_s, v in reversed(points) if at_s <= 0.0), numbers[-1])
    said = (
        f"{shown(figure.unit, last)} when red, from {shown(figure.unit, min(numbers))} "
        f"to {shown(figure.unit, max(numbers))}"
    )
    return (
        f"<figure><figcaption>{escape(figure.title)} <b>{escape(said)}</b></figcaption>"
        f'<svg class="curve" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"{figure.title}: {said}")}">{"".join(drawn)}</svg></figure>'
    )


def _range(numbers: list[float], thresholds: list[float], figure: Figure) -> tuple[float, float]:
    low, high = min([*numbers, *thresholds]), max([*numbers, *thresholds])
    if figure.unit == "ratio" and 0.5 < high <= 1.0:
        return 0.0, 1.0
    if figure.from_zero:
        low = min(0.0, low)
    margin = 0.08 * (high - low) or 1.0
    return (low if figure.from_zero else low - margin), high + margin


def _path(points: list[tuple[float, float]], across: Place, up: Place) -> str:
    made: list[str] = []
    before_s: float | None = None
    for at_s, value in points:
        pen = "L" if before_s is not None and at_s - before_s <= _GAP_S else "M"
        made.append(f"{pen}{across(at_s):.1f} {up(value):.1f}")
        before_s = at_s
    return "".join(made)


def strip(t_s: Sequence[float], levels: Sequence[int | None], rule: str) -> str:
    """A rule's level over time as a coloured band; "" where it was never judged."""
    runs = list(_runs(t_s, levels))
    if not runs:
        return ""
    first_s, span_s = t_s[0], (t_s[-1] - t_s[0]) or 1.0
    drawn = "".join(
        f'<rect class="lv-{level}" x="{WIDTH * (start - first_s) / span_s:.1f}" y="0" height="10" '
        f'width="{max(1.0, WIDTH * (end - start) / span_s):.1f}"><title>{level}</title></rect>'
        for level, start, end in runs
    )
    told = ", ".join(f"{level} for {shown('seconds', end - start)}" for level, start, end in runs[-6:])
    return (
        f'<figure class="whole"><figcaption>Level of {escape(rule)} <b>{escape(told)}</b></figcaption>'
        f'<svg class="strip" viewBox="0 0 {WIDTH:.0f} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"Level of {rule}: {told}")}">{drawn}</svg></figure>'
    )


def _runs(t_s: Sequence[float], levels: Sequence[int | None]) -> Iterable[tuple[str, float, float]]:
    """(level, from, to) of each stretch at one level."""
    current, since_s, until_s = "", 0.0, 0.0
    for at_s, level in zip(t_s, levels, strict=False):
        word = LEVELS.get(level, "") if level is not None else ""
        if word != current:
            if current:
                yield current, since_s, at_s
            current, since_s = word, at_s
        until_s = at_s
    if current:
        yield current, since_s, until_s


def bar(parts: Sequence[tuple[str, float, str]], total: float, label: str) -> str:
    """Parts of a whole (style name, size, words) side by side."""
    at, drawn = 0.0, []
    for part, value, words in parts:
        width = max(0.0, min(1000.0, 1000.0 * value / (total or 1.0)))
        drawn.append(
            f'<rect x="{at:.1f}" y="0" width="{width:.1f}" height="20" fill="var(--{escape(part)})">'
            f"<title>{escape(words)}</title></rect>"
        )
        at += width
    return (
        '<svg class="bar" viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{"".join(drawn)}</svg>'
    )
