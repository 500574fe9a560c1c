"""What is a piece of evidence called, and how does an alert's link find it?

A name is `<UTC time>-<rule>-<server>~<engine>~<uuid>`, for example
`20261130T021501Z-recompute_tax-chat~0~`. What may not stand in a file name and an address alike
is written as `=XX` (hexadecimal, UTF-8), and a part that is too long ends in a checksum.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from kvwatch.model.level import Scope

FOLDER = "/evidence/"
LATEST = "/evidence/latest"
PARTS = ("server", "engine", "uuid")
# Three of these, the time and the rule stay below the 255 bytes of a file name.
PART_MAX = 60

_PART = rf"[A-Za-z0-9._:=-]{{0,{PART_MAX}}}"
_ID = re.compile(rf"([0-9]{{8}}T[0-9]{{6}}Z)-([a-z_]{{1,40}})-({_PART})~({_PART})~({_PART})\Z")
_UNSAFE = re.compile(rb"[^A-Za-z0-9._:-]")
_CODED = re.compile(rb"=([0-9A-F]{2})")
_TIME = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceId:
    """A name taken apart; `server`, `engine` and `uuid` are as they stand in it (coded)."""

    wall_s: float
    rule: str
    server: str
    engine: str
    uuid: str

    def answers(self, wanted: Mapping[str, str]) -> bool:
        """Whether this is about what is wanted: `rule`, `server`, `engine`, `uuid`, each only where given."""
        if wanted.get("rule", self.rule) != self.rule:
            return False
        return all(coded(wanted[name]) == getattr(self, name) for name in PARTS if name in wanted)

    def shown(self) -> dict[str, str]:
        """The scope in words for people and programs."""
        return {name: _plain(getattr(self, name)) for name in PARTS}


def coded(text: str) -> str:
    """One part of a name: safe in a file name and in an address."""
    raw = _UNSAFE.sub(lambda found: b"=%02X" % found[0][0], text.encode("utf-8", "replace"))
    if len(raw) > PART_MAX:
        raw = b"%s=%08X" % (raw[: PART_MAX - 9], zlib.crc32(text.encode("utf-8", "replace")))
    return raw.decode("ascii")


def _plain(part: str) -> str:
    raw = _CODED.sub(lambda found: bytes([int(found[1], 16)]), part.encode("ascii"))
    return raw.decode("utf-8", "replace")


def subject(rule: str, scope: Scope) -> str:
    """What a piece of evidence is about: its name without the time."""
    return f"{rule}-{coded(scope.server)}~{coded(scope.engine)}~{coded(scope.uuid)}"


def name(wall_s: float, rule: str, scope: Scope) -> str:
    """The name of evidence that was taken at this Unix time."""
    return f"{datetime.fromtimestamp(wall_s, UTC).strftime(_TIME)}-{subject(rule, scope)}"


def parse(text: str) -> EvidenceId | None:
    """The name taken apart; None for what is no name."""
    found = _ID.match(text)
    if found is None:
        return None
    try:
        at = datetime.strptime(found[1], _TIME).replace(tzinfo=UTC)
    except ValueError:
        return None
    return EvidenceId(wall_s=at.timestamp(), rule=found[2], server=found[3], engine=found[4], uuid=found[5])


def link(host: str, rule: str, labels: Mapping[str, str]) -> str:
    """Where the newest evidence of a rule is; `host` is `name:port`, the values are ready for a query."""
    query = "".join(f"&{part}={labels.get(part, '')}" for part in PARTS)
    return f"http://{host}{LATEST}?rule={rule}{query}"
