"""Who is this server, and where does it meet kvwatch? The environment alone says so."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

DEFAULT_RUNTIME = "/run/kvwatch"
_NAME = r"[a-z0-9][a-z0-9._-]{0,62}"


class Place(NamedTuple):
    """The server's name in kvwatch's configuration, the socket to send to, and the lease file to obey."""

    server: str
    socket: str
    lease: str


class PlaceError(ValueError):
    """The name is not one that kvwatch takes; the text says which are."""


def place(server: str | None = None, environ: Mapping[str, str] = os.environ) -> Place | None:
    """Where KVWATCH_SERVER, KVWATCH_RUNTIME and KVWATCH_SOCKET point; None where no server is named.

    Raises PlaceError for a name that kvwatch would refuse.
    """
    name = server or environ.get("KVWATCH_SERVER", "")
    if not name:
        return None
    if re.fullmatch(_NAME, name, re.ASCII) is None:
        raise PlaceError(f"KVWATCH_SERVER={name[:64]!r}: expected a name of a-z 0-9 . _ - as in kvwatch.yml")
    runtime = environ.get("KVWATCH_RUNTIME") or DEFAULT_RUNTIME
    return Place(
        server=name,
        socket=environ.get("KVWATCH_SOCKET") or f"{runtime}/agent.sock",
        lease=f"{runtime}/limits/{name}.json",
    )
