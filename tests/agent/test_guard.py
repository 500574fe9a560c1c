"""The one guard: nothing of the agent reaches its host, and nothing else catches everything."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvwatch.agent
from kvwatch.agent.guard import MOST_TOLD, Guard

FOLDER = Path(kvwatch.agent.__file__).parent
BROAD = ("Exception", "BaseException")


def broken(text: str = "moved in this release") -> int:
    raise KeyError(text)


class UnspeakableError(Exception):
    """An error whose text cannot even be made."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def catch_alls(path: Path) -> Iterator[str]:
    """Every place of a file that catches everything, whichever way it is written."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[ast.expr] = []
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{path.name}:{node.lineno}"
                continue
            names = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            names = node.args
        if any(ast.unparse(name).rpartition(".")[2] in BROAD for name in names):
            yield f"{path.name}:{node.lineno}"


def test_everything_is_caught_in_one_place() -> None:
    """In the whole agent there is one catch-all: the guard's."""
    found = [place for path in sorted(FOLDER.rglob("*.py")) for place in catch_alls(path)]

    assert len(found) == 1, found
    assert found[0].startswith("guard.py:")


def test_result_and_arguments_pass() -> None:
    """Without a fault the guard is not there."""
    guard = Guard()

    assert guard.run("divide", divmod, 7, 3, otherwise=None) == (2, 1)
    assert guard.faults == 0


def test_fault_is_counted_and_said_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    """The same fault at the same place is one line; another one, or the first again, is a new one."""
    guard = Guard()
    for text in ("a", "a", "a", "b", "b", "a"):
        assert guard.run("read", broken, text, otherwise=7) == 7
    guard.run("write", broken, "a", otherwise=None)

    assert guard.faults == 7
    assert [record.getMessage() for record in caplog.records] == [
        "kvwatch agent: cannot read: KeyError: 'a'",
        "kvwatch agent: cannot read: KeyError: 'b'",
        "kvwatch agent: cannot read: KeyError: 'a'",
        "kvwatch agent: cannot write: KeyError: 'a'",
    ]


def test_log_is_never_filled(caplog: pytest.LogCaptureFixture) -> None:
    """A fault that differs every time is said so many times and counted for ever."""
    guard = Guard()
    for number in range(1000):
        guard.run("read", broken, str(number), otherwise=0)

    assert guard.faults == 1000
    assert len(caplog.records) == MOST_TOLD


def test_mending_follows_a_fault_and_may_fail_itself(caplog: pytest.LogCaptureFixture) -> None:
    """What a fault leaves behind is undone; a fault while undoing is one more that goes no further."""
    guard, undone = Guard(), []
    guard.run("limit", broken, otherwise=None, mend=lambda: undone.append("limit"))
    guard.run("limit", broken, otherwise=None, mend=broken)
    guard.run("limit", int, otherwise=None, mend=broken)

    assert undone == ["limit"]
    assert guard.faults == 3
    assert "cannot limit, nor undo it" in caplog.text


def test_fault_that_cannot_be_told_stays_inside(caplog: pytest.LogCaptureFixture) -> None:
    """An error without a text, and a log that fails, are counted; the host goes on."""

    class Broken(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("no log today")

    def unspeakable() -> int:
        raise UnspeakableError

    guard, silent = Guard("kvwatch.agent.test"), Broken()
    assert guard.run("read", unspeakable, otherwise=1) == 1
    guard.log().addFilter(silent)
    try:
        assert guard.run("read", broken, otherwise=2) == 2
    finally:
        guard.log().removeFilter(silent)

    assert guard.faults == 4
    assert caplog.records == []


@pytest.mark.parametrize("asked", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_the_host_asks_for_passes(asked: type[BaseException]) -> None:
    """An interrupt and an exit are the host's, not faults."""

    def ask() -> None:
        raise asked

    with pytest.raises(asked):
        Guard().run("read", ask, otherwise=None)
