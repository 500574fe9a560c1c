"""Reads metric names and labels back out of PromQL text, independently of the builder that wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvwatch.catalogue.metrics import METRICS

TARGET = {"job", "instance"}
LABELS = {row.name: set(row.labels) | TARGET for row in METRICS}
_SELECTOR = re.compile(r"\b(kvwatch_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*(?:"|%q)')
_GROUPING = re.compile(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)")


def selectors(text: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels matched) of every selector."""
    for found in _SELECTOR.finditer(text):
        yield found[1], set(_MATCHER.findall(found[2] or ""))


def mistakes(text: str) -> list[str]:
    """Names that the catalogue does not have."""
    wrong = []
    carried: set[str] = set()
    for name, labels in selectors(text):
        if name not in LABELS:
            wrong.append(f"no metric {name}")
            continue
        carried |= LABELS[name]
        wrong += [f"{name} has no label {label}" for label in sorted(labels - LABELS[name])]
    for found in _GROUPING.finditer(text):
        grouped = {label.strip() for label in found[1].split(",") if label.strip()}
        wrong += [f"nothing here has a label {label}" for label in sorted(grouped - carried - TARGET)]
    return wrong
