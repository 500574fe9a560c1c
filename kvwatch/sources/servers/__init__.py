"""Adapters for inference servers, one file per engine, found by module name."""

from __future__ import annotations

import pkgutil

_NO_KINDS = frozenset({"base", "registry"})


def kinds() -> tuple[str, ...]:
    """Kinds with an adapter here, sorted. Nothing is imported for this."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in found if name not in _NO_KINDS and not name.startswith("_")))
