"""Does this password open the door? Basic authentication against bcrypt hashes.

One bcrypt check takes 50 ms and more on purpose, so results are remembered, under a keyed
digest that is worth nothing outside this process; and the check itself is made by a thread
that answers nobody, so that a flood of wrong passwords cannot hold up a scraper with a known one.
"""

from __future__ import annotations

import binascii
import enum
from collections.abc import Mapping

MAX_REMEMBERED = 1024


class Access(enum.Enum):
    """What a request may do."""

    ALLOWED = "allowed"
    DENIED = "denied"
    UNCHECKED = "unchecked"  # `verify` has to be called, away from the answering threads


class Authenticator:
    """Checks Authorization headers against a table of users; knows the answers that it gave."""

    def __init__(self) -> None:
        import hashlib
        import secrets

        self._key = secrets.token_bytes(32)
        self._hash = hashlib.blake2b
        self._allowed: set[bytes] = set()
        self._denied: set[bytes] = set()

    def check(self, users: Mapping[str, str], authorization: str) -> Access:
        """What is known of these credentials, at once."""
        found = credentials(authorization)
        if found is None:
            return Access.DENIED
        digest = self._digest(users, *found)
        if digest in self._allowed:
            return Access.ALLOWED
        return Access.DENIED if digest in self._denied else Access.UNCHECKED

    def verify(self, users: Mapping[str, str], authorization: str) -> Access:
        """Check these credentials with bcrypt (slow) and remember the answer."""
        found = credentials(authorization)
        if found is None:
            return Access.DENIED
        # an unknown user is checked against somebody's hash, so that both answers take as long
        hashed = users.get(found[0]) or next(iter(users.values()), "")
        good = bcrypt_matches(found[1], hashed) and found[0] in users
        known = self._allowed if good else self._denied
        if len(known) >= MAX_REMEMBERED:
            known.clear()
        known.add(self._digest(users, *found))
        return Access.ALLOWED if good else Access.DENIED

    def _digest(self, users: Mapping[str, str], user: str, password: bytes) -> bytes:
        """Of user, password and the hash in force: a changed hash is a new question."""
        fields = (user.encode(), users.get(user, "").encode(), password)
        text = b"".join(len(part).to_bytes(4, "big") + part for part in fields)
        return self._hash(text, key=self._key, digest_size=32).digest()


def credentials(authorization: str) -> tuple[str, bytes] | None:
    """User and password of a Basic header; None where there are none."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = binascii.a2b_base64(encoded.strip(), strict_mode=True).partition(b":")
        return (user.decode("utf-8"), password) if colon else None
    except (binascii.Error, ValueError):
        return None


def bcrypt_matches(password: bytes, hashed: str) -> bool:
    """Whether the password has this bcrypt hash; bcrypt itself reads no more than 72 bytes."""
    import bcrypt

    try:
        return bcrypt.checkpw(password[:72], hashed.encode("ascii"))
    except ValueError:  # a NUL in the password, or a hash that bcrypt does not take
        return False
