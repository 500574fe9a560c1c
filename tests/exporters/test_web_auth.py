"""Passwords: who gets in, and that a flood of wrong ones holds nobody up."""

from __future__ import annotations

import base64
import contextlib

import bcrypt
import pytest

from kvwatch.exporters.web_auth import Access, Authenticator, credentials
from kvwatch.exporters.web_config import WebConfig
from kvwatch.exporters.web_limits import Limits
from tests.exporters.serve import ask, connect, read_answer, request, serving

LONG = "x" * 100


def hashed(password: str, cost: int = 4) -> str:
    """A bcrypt hash."""
    return bcrypt.hashpw(password.encode()[:72], bcrypt.gensalt(cost)).decode()


USERS = {"alice": hashed("wonder:land"), "bob": hashed(LONG), "zoë": hashed("ünïcode")}


def config() -> WebConfig:
    """Three users."""
    return WebConfig(users=USERS)


def basic(user: str, password: str) -> str:
    """An Authorization header."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (basic("alice", "wonder:land"), 200),
        (basic("alice", "wonder:land").replace("Basic", "basic"), 200),
        (basic("bob", LONG), 200),
        (basic("zoë", "ünïcode"), 200),
        (basic("alice", "wrong"), 401),
        (basic("nobody", "wonder:land"), 401),
        (basic("alice", ""), 401),
        (basic("", ""), 401),
        (basic("alice", "a\0b"), 401),
        ("Basic !!!", 401),
        ("Basic " + base64.b64encode(b"nocolon").decode(), 401),
        ("Basic " + base64.b64encode(b"\xff\xfe:x").decode(), 401),
        ("Bearer abc", 401),
        ("", 401),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/", "/api/v1/state", "/-/healthy", "/nothing"])
def test_nothing_is_served_without_the_password(header: str, status: int, path: str) -> None:
    """Every path wants the password, twice in a row the answer is the same, and nothing leaks with 401."""
    with serving(web_config=config) as server, connect(server) as sock:
        for _ in range(2):
            sock.sendall(request(path, Authorization=header) if header else request(path))
            answer = read_answer(sock)
            assert answer.status == (404 if status == 200 and path == "/nothing" else status)
            if status == 401:
                assert answer.headers["www-authenticate"] == 'Basic realm="kvwatch"'
                assert answer.body == b"a user and a password are wanted\n"


def test_reload_wants_the_password_too() -> None:
    """A reload without a password is not carried out."""
    from tests.exporters.serve import FixedProvider

    provider = FixedProvider()
    with serving(provider, web_config=config, enable_lifecycle=True) as server:
        assert ask(server, "/-/reload", method="POST").status == 401
    assert provider.reloads == 0


def test_a_changed_password_counts_at_once() -> None:
    """When the hash changes, the remembered old password is worth nothing."""
    users = {"alice": hashed("old")}
    with serving(web_config=lambda: WebConfig(users=dict(users))) as server:
        assert ask(server, "/metrics", Authorization=basic("alice", "old")).status == 200
        users["alice"] = hashed("new")
        assert ask(server, "/metrics", Authorization=basic("alice", "old")).status == 401
        assert ask(server, "/metrics", Authorization=basic("alice", "new")).status == 200
        users.clear()
        users["bob"] = hashed("x")
        assert ask(server, "/metrics", Authorization=basic("alice", "new")).status == 401


def test_a_flood_of_wrong_passwords_does_not_delay_a_known_one() -> None:
    """While slow checks pile up, a scraper whose password is known is answered before they are done."""
    slow = {"alice": hashed("right", 11)}
    with serving(web_config=lambda: WebConfig(users=slow), limits=Limits(unchecked=8)) as server:
        good = basic("alice", "right")
        assert ask(server, "/metrics", Authorization=good).status == 200
        with contextlib.ExitStack() as stack:
            flood = [stack.enter_context(connect(server)) for _ in range(30)]
            for i, sock in enumerate(flood):
                sock.sendall(request("/metrics", Authorization=basic("alice", f"guess {i}")))
            assert ask(server, "/metrics", Authorization=good).status == 200
            assert server._guard.unchecked.qsize() > 0  # the guesses still wait
            statuses = [read_answer(sock).status for sock in flood]

    assert set(statuses) == {401, 503}


def test_verified_passwords_are_remembered() -> None:
    """The second look at the same credentials needs no bcrypt; nothing readable is kept."""
    auth = Authenticator()
    good, bad = basic("alice", "wonder:land"), basic("alice", "wrong")

    assert auth.check(USERS, good) is Access.UNCHECKED
    assert auth.verify(USERS, good) is Access.ALLOWED
    assert auth.check(USERS, good) is Access.ALLOWED
    assert auth.verify(USERS, bad) is Access.DENIED
    assert auth.check(USERS, bad) is Access.DENIED
    assert b"wonder" not in repr(vars(auth)).encode()


def test_somebody_elses_password_opens_nothing() -> None:
    """An unknown name is checked against somebody's hash to take as long; even a match does not let it in."""
    users = {"alice": hashed("x")}
    auth = Authenticator()

    assert auth.verify(users, basic("nobody", "x")) is Access.DENIED
    assert auth.verify(users, basic("alice", "x")) is Access.ALLOWED


def test_users_and_passwords_cannot_be_shifted() -> None:
    """The boundary between user and password is part of what is remembered."""
    auth = Authenticator()
    users = {"a": hashed("b:c")}
    auth.verify(users, basic("a", "b:c"))

    assert auth.check(users, basic("a:b", "c")) is Access.ALLOWED  # the same header: a colon ends the name
    assert credentials(basic("a:b", "c")) == ("a", b"b:c")
