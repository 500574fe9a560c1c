"""Generated fixtures are what the generator makes."""

from __future__ import annotations

import pytest

from tests.sources.servers import made, recorded

PAGES = dict(made.pages())


@pytest.mark.parametrize("path", sorted(PAGES))
def test_generated_page_is_as_generated(path: str, request: pytest.FixtureRequest) -> None:
    """A generated fixture is not edited by hand: it is equal to what the generator makes."""
    file = recorded.ROOT / path

    if request.config.getoption("--update"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(PAGES[path])
    assert file.read_bytes() == PAGES[path]


def test_every_page_is_recorded_or_generated() -> None:
    """No generated folder keeps a page that the generator does not make."""
    generated = {path.rpartition("/")[0] for path in PAGES}
    lying = {
        str(file.relative_to(recorded.ROOT))
        for folder in generated
        for file in recorded.ROOT.glob(f"{folder}/*")
        if not file.name.endswith(".expected.json")
    }

    assert lying == set(PAGES)
