"""The configuration: YAML to complete, typed settings, with every mistake reported at once.

`load` reads a file, `parse` a text, `default_settings` is what a file without any key means. Mistakes are
a `ConfigError` whose findings read `FILE:line:col: path: message`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvwatch.config.files import MAX_FILE_BYTES, read_text
from kvwatch.config.findings import DOCUMENT, ConfigError, Finding, Findings, UnreadableConfig
from kvwatch.config.nodes import MapNode, compose
from kvwatch.config.readers import Place
from kvwatch.config.rulebook import shipped
from kvwatch.config.schema import ROOT, check_across
from kvwatch.config.table import Record
from kvwatch.config.units import listen_address as parse_listen
from kvwatch.config.watching import KINDS, MAPPABLE
from kvwatch.model.settings import Mode, Settings

if TYPE_CHECKING:
    from kvwatch.exporters.web_config import WebConfigFile

EMPTY = "is empty; write `servers: []` to watch GPUs alone, or remove the file to watch what is found"

__all__ = [
    "KINDS",
    "MAPPABLE",
    "MAX_FILE_BYTES",
    "ConfigError",
    "Finding",
    "UnreadableConfig",
    "default_settings",
    "load",
    "parse",
    "parse_listen",
    "read_text",
    "web_config_reader",
]


def web_config_reader(path: str | None) -> WebConfigFile | None:
    """The web configuration as the web server wants it; None without a path.

    Raises UnreadableConfig, or ConfigError with what is wrong in it.
    """
    if path is None:
        return None
    from kvwatch.config import webfile  # only with such a file

    return webfile.web_config_reader(path)


def default_settings() -> Settings:
    """What a file without any key means: every default, with every rule filled in."""
    return Settings(rules=dict(shipped()))


def load(path: str | Path, *, mode: Mode | None = None) -> Settings:
    """The settings in a file. `mode` stands for the file's `control.mode` where given.

    Raises UnreadableConfig when there is no readable text, ConfigError with every finding.
    """
    return parse(read_text(path), str(path), mode=mode)


def parse(text: str, filename: str, *, mode: Mode | None = None) -> Settings:
    """The settings in a text; `filename` is only for the findings. Raises ConfigError."""
    findings = Findings(filename)
    if not text.strip():  # what an editor leaves for a moment while it saves
        findings.add(1, 1, DOCUMENT, EMPTY)
        findings.raise_if_any()
    node = compose(text, findings)
    findings.raise_if_any()
    if node is None:
        node = MapNode(1, 1)
    root = Place(node, "", findings).value(ROOT)
    if isinstance(root, Record):
        check_across(root, mode)
    findings.raise_if_any()
    settings: Settings = root.build()
    return settings
