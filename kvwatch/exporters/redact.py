"""Which texts may leave the process? Command lines and addresses do, their secrets do not."""

from __future__ import annotations

import re

HIDDEN = "[hidden]"

_WORD = r"(?:key|token|secret|password|passwd|passphrase|pwd|credentials?|auth|authorization)"
# Every repetition is bounded, and starts only where a word starts: process names are hostile, and a
# pattern that tries again at each of n characters would let one of them stop the exporter.
_VALUE = r"(?:\"[^\"]{0,512}\"|'[^']{0,512}'|[^\s&,;\"']+)"
_RULES = (
    # scheme://user:password@host
    (re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,20}://)[^/\s@]{1,512}@", re.I), rf"\1{HIDDEN}@"),
    # Authorization headers
    (re.compile(r"\b(bearer|basic)\s{1,8}[\w.~+/=-]{6,}", re.I), rf"\1 {HIDDEN}"),
    # --hf-token=X, FOO_TOKEN=X, ?token=X, "password": "X"
    (re.compile(rf"((?:\b|[-_]){_WORD}[\"']?\s{{0,8}}[=:]\s{{0,8}}){_VALUE}", re.I), rf"\1{HIDDEN}"),
    # --api-key X
    (re.compile(rf"(?<!\S)(--?[\w-]{{0,40}}{_WORD}\s{{1,8}})(?!-){_VALUE}", re.I), rf"\1{HIDDEN}"),
    # keys that are known by their look
    (re.compile(r"\b(?:sk|hf|ghp|gho|xox[abp]|glpat)[-_][\w-]{8,}"), HIDDEN),
    (re.compile(r"(?<![\w-])eyJ[\w-]{10,2048}\.[\w-]+\.[\w-]*"), HIDDEN),
)
# Without one of these no rule can match: looking for them first takes a hundredth of the time.
_HINTS = (
    *("://", "key", "token", "secret", "pass", "pwd", "credential", "auth", "bearer ", "basic "),
    *("sk-", "sk_", "hf-", "hf_", "gh", "xox", "glpat", "eyj"),
)
_SECRET_NAME = re.compile(_WORD, re.I)
_HARMLESS = frozenset({"tokens", "num_tokens", "prompt_tokens", "generation_tokens"})


def text(value: str) -> str:
    """The same text with everything that looks like a secret replaced."""
    lowered = value.lower()
    if not any(hint in lowered for hint in _HINTS):
        return value
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
