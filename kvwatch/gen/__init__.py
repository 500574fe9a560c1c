"""Generated artefacts: dashboards, alerting rules with their tests, reference pages.

Everything here is made from the catalogue, the table of rules and the configuration's table, and is
committed, so that nobody needs Python to use it. `run` writes the files or says which differ.
"""

from __future__ import annotations

from pathlib import Path


def outputs() -> dict[str, str]:
    """Every generated file: path relative to the repository, and its text. Needs grafanalib."""
    from kvwatch.gen import alert_rules, alert_tests, boards, pages

    return {**alert_rules.files(), **alert_tests.files(), **boards.files(), **pages.files()}


def run(root: Path, check: bool) -> list[str]:
    """Write every generated file below `root`; with `check` write nothing.

    Returns the paths (relative to `root`) that differed from what the code produces now.
    """
    changed = []
    for name, text in outputs().items():
        path = root / name
        if path.is_file() and path.read_bytes() == text.encode():
            continue
        changed.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return changed
