"""Log lines that never hold up whoever logs, with their fields and without secrets."""

from __future__ import annotations

import logging
import os
import sys

from kvwatch.exporters import redact
from kvwatch.exporters.lines import TextWriter

# What every record has; anything else was given as `extra` and is shown behind the message.
_ORDINARY = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# syslog priorities as systemd reads them from the start of a line (sd-daemon(3))
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG_PRIORITY = 7


class Lines(logging.Formatter):
    """One record as text: `time LEVEL name: message field=value`; under systemd `<priority>name: …`.

    systemd stamps the time itself and reads the priority at the start of every line.
    """

    def __init__(self, *, systemd: bool) -> None:
        stamp = "" if systemd else "%(asctime)s %(levelname)s "
        super().__init__(f"{stamp}%(name)s: %(message)s")
        self._systemd = systemd

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The first line, with the fields behind it."""
        fields = [f" {name}={value}" for name, value in vars(record).items() if name not in _ORDINARY]
        return super().formatMessage(record) + "".join(fields)

    def format(self, record: logging.LogRecord) -> str:
        """The whole text, tracebacks included."""
        text = redact.text(super().format(record))
        if not self._systemd:
            return text
        number = next((n for level, n in _PRIORITIES if record.levelno >= level), _DEBUG_PRIORITY)
        return "\n".join([f"<{number}>{line}" for line in text.splitlines()])


class Handler(logging.Handler):
    """Hands lines to a writer: a log that nobody reads must not stop the loop."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._writer = TextWriter(fd, name="log")

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record's text; dropped where too many wait."""
        try:
            self._writer.offer([self.format(record)])
        except (ValueError, TypeError, KeyError):  # the arguments do not fit the message: a bug of ours
            self.handleError(record)

    def close(self) -> None:
        """Write what is queued, for half a second at most."""
        self._writer.close()
        super().close()


def set_up(level: str) -> Handler:
    """Log to standard error. Close the handler at the end."""
    handler = Handler(sys.stderr.fileno())
    handler.setFormatter(Lines(systemd=read_by_journal(sys.stderr.fileno())))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    return handler


def read_by_journal(fd: int) -> bool:
    """Whether this descriptor leads to the journal (systemd names its device and inode)."""
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM", "") == f"{found.st_dev}:{found.st_ino}"
