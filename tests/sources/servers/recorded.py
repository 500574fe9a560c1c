"""Recorded pages of real servers, by engine, version and case.

`tests/fixtures/servers/<engine>/<version>/<case>.<endpoint>.{prom,json}[.gz]`, beside them what is read
from them (`<case>.expected.json`) and, where a case needs it, `<case>.settings.json`.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from kvwatch.model.server import ServerState
from kvwatch.model.settings import ServerSettings

ROOT = Path(__file__).parents[2] / "fixtures" / "servers"


@dataclass(frozen=True)
class Case:
    """One recorded state of one server."""

    folder: Path
    name: str

    @property
    def kind(self) -> str:
        return self.folder.parent.name

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.folder.name}-{self.name}"

    @property
    def expected_file(self) -> Path:
        return self.folder / f"{self.name}.expected.json"

    def pages(self) -> dict[str, bytes]:
        found = {}
        for path in self.folder.glob(f"{self.name}.*"):
            endpoint = path.name.split(".")[1]
            if endpoint not in ("expected", "settings"):
                found[endpoint] = _bytes(path)
        return found

    def settings(self) -> ServerSettings:
        path = self.folder / f"{self.name}.settings.json"
        extra = json.loads(path.read_text()) if path.exists() else {}
        return ServerSettings(name="recorded", kind=self.kind, **extra)


def _bytes(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def cases(kind: str = "*") -> list[Case]:
    """All cases of an engine, in order."""
    found = {
        Case(path.parent, path.name.split(".")[0])
        for path in ROOT.glob(f"{kind}/*/*")
        if not path.name.endswith((".expected.json", ".settings.json"))
    }
    return sorted(found, key=lambda case: case.id)


def page(kind: str, version: str, case: str, endpoint: str = "metrics") -> bytes:
    """One recorded page."""
    return Case(ROOT / kind / version, case).pages()[endpoint]


def as_json(state: ServerState) -> dict[str, object]:
    """A state as plain data; what is not reported is left out."""
    plain = json.loads(json.dumps(dataclasses.asdict(state)))
    stripped = _without_none(plain)
    assert isinstance(stripped, dict)
    return stripped


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    return value
