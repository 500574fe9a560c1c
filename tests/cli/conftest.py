"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.street import Street


@pytest.fixture
def street(tmp_path: Path) -> Iterator[Street]:
    """A host's processes, ended afterwards."""
    folder = tmp_path / "street"
    folder.mkdir()
    street = Street(folder)
    yield street
    street.close()
