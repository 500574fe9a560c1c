"""A configuration file's text, or one clear reason why there is none."""

from __future__ import annotations

import stat
from pathlib import Path

from kvwatch.config.findings import UnreadableConfig

MAX_FILE_BYTES = 1024 * 1024


def read_text(path: str | Path) -> str:
    """The text of a regular file of at most 1 MiB in UTF-8. Raises UnreadableConfig with the fix."""
    file = Path(path)
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise UnreadableConfig(f"{path}: not a regular file; name the configuration file itself")
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UnreadableConfig(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # a NUL in the path
        raise UnreadableConfig("the path of the configuration is not a valid path") from error
    if len(data) > MAX_FILE_BYTES:
        raise UnreadableConfig(f"{path}: larger than {MAX_FILE_BYTES} bytes; this is no configuration")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UnreadableConfig(f"{path}: not UTF-8 (line {line}); save it as UTF-8") from error
