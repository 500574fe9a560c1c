"""Log lines: with their fields, without secrets, for people and for the journal."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kvwatch.cli.log import Handler, Lines, read_by_journal


def record(message: str, level: int = logging.WARNING, **fields: object) -> logging.LogRecord:
    """A record as `log.warning(message, extra=fields)` makes it."""
    made = logging.makeLogRecord(
        {"name": "kvwatch.x", "levelno": level, "levelname": "WARNING", "msg": message}
    )
    vars(made).update(fields)
    return made


def test_fields_stand_behind_the_message() -> None:
    """What is given as `extra` is shown: it says which file, process or GPU is meant."""
    line = Lines(systemd=False).format(record("not written", path="/a/b", error="no space"))
    assert line.endswith("WARNING kvwatch.x: not written path=/a/b error=no space")


def test_secrets_are_hidden() -> None:
    """Passwords in addresses and tokens do not get into the log, whoever logs them."""
    line = Lines(systemd=False).format(record("no http://u:hunter22@h", header="Bearer abcdefgh12345"))
    assert "hunter22" not in line
    assert "abcdefgh12345" not in line


@pytest.mark.parametrize(
    ("level", "start"),
    [(logging.ERROR, "<3>"), (logging.WARNING, "<4>"), (logging.INFO, "<6>"), (logging.DEBUG, "<7>")],
)
def test_the_journal_gets_priorities(level: int, start: str) -> None:
    """Under systemd every line, of a traceback too, begins with its priority and has no time of ours."""
    lines = Lines(systemd=True).format(record("one\ntwo", level=level)).splitlines()
    assert lines == [f"{start}kvwatch.x: one", f"{start}two"]


def test_only_the_journal_is_taken_for_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JOURNAL_STREAM names one stream; any other descriptor gets lines for people."""
    with (tmp_path / "a").open("w") as named, (tmp_path / "b").open("w") as other:
        found = os.fstat(named.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        assert read_by_journal(named.fileno())
        assert not read_by_journal(other.fileno())
    assert not read_by_journal(-1)


def test_a_record_that_cannot_be_formatted_raises_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments that do not fit the message are reported on standard error; the next line still comes."""
    with (tmp_path / "log").open("wb") as file:
        handler = Handler(file.fileno())
        handler.setFormatter(Lines(systemd=False))
        bad = record("%d apples")
        bad.args = ("three",)
        handler.handle(bad)
        handler.handle(record("next"))
        handler.close()
    assert (tmp_path / "log").read_text().endswith("next\n")
    assert "three" in capsys.readouterr().err
