"""The configurations that the documentation shows are good ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvwatch import config
from kvwatch.model.settings import Mode

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = ("README.md", "docs/policies.md")


def _whole(page: str) -> list[str]:
    """The blocks of a page that stand for a whole file (they name servers)."""
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [block for block in blocks if block.startswith("servers:")]


@pytest.mark.parametrize("page", PAGES)
def test_a_shown_configuration_is_accepted(page: str) -> None:
    """A page's example passes as it stands."""
    assert _whole(page)
    for block in _whole(page):
        assert config.parse(block, page).servers


def test_the_example_that_advises_may_also_act() -> None:
    """Setting `mode: act`, as the page says, leaves no finding."""
    (block,) = _whole("docs/policies.md")
    acting = re.sub(r"mode: advise", "mode: act   ", block)

    assert config.parse(acting, "policies.md").control.mode is Mode.ACT
