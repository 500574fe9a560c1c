"""Which texts may leave the process? Command lines and addresses do, their secrets do not."""

from __future__ import annotations

import re

HIDDEN = "[hidden]"

_WORD = r"(?:key|token|secret|password|passwd|passphrase|pwd|credentials?|auth|authorization)"
_RULES = (
    # scheme://user:password@host
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    # Authorization headers
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    # --api-key X, --hf-token=X, FOO_TOKEN=X, ?token=X, "password": "X"
    (
        re.compile(
            rf"((?:\b|[-_]){_WORD}[\"']?\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s&,;\"']+)", re.IGNORECASE
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(rf"(--?[\w-]*{_WORD}\s+)(?!-)(?:\"[^\"]*\"|'[^']*'|\S+)", re.IGNORECASE), rf"\1{HIDDEN}"),
    # keys that are known by their look
    (re.compile(r"\b(?:sk|hf|ghp|gho|xox[abp]|glpat)[-_][\w-]{8,}"), HIDDEN),
    (re.compile(r"\beyJ[\w-]{10,}\.[\w-]+\.[\w-]*"), HIDDEN),
)
_SECRET_NAME = re.compile(_WORD, re.IGNORECASE)
_HARMLESS = frozenset({"tokens", "num_tokens", "prompt_tokens", "generation_tokens"})


def text(value: str) -> str:
    """The same text with everything that looks like a secret replaced."""
    for pattern, replacement in _RULES:
        value = pattern.sub(replacement, value)
    return value


def url(value: str) -> str:
    """An address without user, password, query and fragment."""
    scheme, found, rest = value.partition("://")
    if not found:
        return text(value)
    authority, slash, path = rest.partition("/")
    path = path.partition("?")[0].partition("#")[0]
    return f"{scheme}://{authority.rpartition('@')[2].partition('?')[0]}{slash}{path}"


def is_secret_name(name: str) -> bool:
    """Whether a field of this name must not be shown (`key_file` names a file, and may)."""
    lowered = name.lower()
    if lowered.endswith(("_file", "_tokens", "_tokens_total")) or lowered in _HARMLESS:
        return False
    return _SECRET_NAME.search(lowered) is not None
