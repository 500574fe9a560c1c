"""What the documentation points at and tells people to type is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests/fixtures").rglob("*.md"))
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
ROOMS = "docs|kvwatch|tests|packaging|systemd|alerts|dashboards|checks|tools"
BACKTICKED_PATH = re.compile(rf"`((?:{ROOMS})/[\w./-]+)`")
CODE = re.compile(r"^```.*?$(.*?)^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
MAKE = re.compile(r"^(?:sudo )?make +([a-z][a-z-]*)|`(?:sudo )?make +([a-z][a-z-]*)", re.MULTILINE)
COMMAND = re.compile(r"^(?:sudo )?(?:[\w./]*bin/)?kvwatch +([a-z][a-z-]*)([^#\n]*)", re.MULTILINE)
FLAG = re.compile(r"(?<=\s)--[a-z][\w.-]*")


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _anchors(text: str) -> set[str]:
    """The names GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _broken(page: str) -> list[str]:
    broken = []
    for link in LINK.findall(_text(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        known = target.exists() and (not anchor or anchor in _anchors(target.read_text(encoding="utf-8")))
        if not known:
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page: str) -> None:
    """Each link to a file of this repository names one that exists, and a heading that is in it."""
    assert _broken(page) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_path_in_backticks_exists(page: str) -> None:
    """A file of this repository that is named in running text is there."""
    named = {path.rstrip(".") for path in BACKTICKED_PATH.findall(_text(page))}

    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_exists(page: str) -> None:
    """Each `make X` that a page shows is a target of the Makefile."""
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    shown = {first or second for first, second in MAKE.findall(_text(page))}

    assert shown <= targets


def _commands(page: str) -> set[tuple[str, str, str]]:
    """(page, command, a flag of it or "") of every command line in code of a page."""
    code = "\n".join(block or inline for block, inline in CODE.findall(_text(page)))
    return {(page, name, flag) for name, rest in COMMAND.findall(code) for flag in ("", *FLAG.findall(rest))}


def _help(*words: str) -> str:
    """What `--help` says, or nothing where there is no such command."""
    command = [sys.executable, "-m", "kvwatch", *words, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_every_command_and_flag_in_the_pages_exists() -> None:
    """Each `kvwatch X --flag` in the code of a page is what `kvwatch X --help` knows."""
    shown = {each for page in PAGES for each in _commands(page)}
    helps = {name: _help(name) for _, name, _ in shown}

    assert {"run", "check", "probe", "restore", "maintenance", "gen"} <= set(helps)
    assert [each for each in sorted(shown) if not helps[each[1]] or each[2] not in helps[each[1]]] == []


def test_a_missing_target_is_noticed(tmp_path: Path) -> None:
    """The check of links can fail: a link to nowhere and a heading that is not there are found."""
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](gone.md) [b](#here) [c](#there) [d](https://example.org/x)\n")

    assert _broken(str(page)) == ["gone.md", "#there"]
