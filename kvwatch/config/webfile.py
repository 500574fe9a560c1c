"""The web configuration (TLS and users): YAML to the checked form the web server uses.

What may stand in it is the web server's business (`exporters.web_config`); here it is read, and
its findings get their lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvwatch.config.files import read_text
from kvwatch.config.findings import DOCUMENT, ConfigError, Findings, UnreadableConfig
from kvwatch.config.nodes import ListNode, MapNode, Node, ScalarNode, compose
from kvwatch.config.units import is_number
from kvwatch.exporters import web_config


def web_config_reader(path: str) -> web_config.WebConfigFile:
    """The file as the web server wants it: a callable that reads it again when it changes.

    Raises UnreadableConfig, or ConfigError with what is wrong in it.
    """
    read_web_config(path)
    reader = web_config.WebConfigFile(path, _parse)
    findings = reader.load()
    if findings:  # it changed between the two readings
        raise UnreadableConfig(f"{path}: {'; '.join(message for _, message in findings)}")
    return reader


def read_web_config(path: str) -> web_config.WebConfig:
    """Read and check it once. Raises UnreadableConfig, or ConfigError with a place for each finding."""
    findings = Findings(path)
    root = compose(read_text(path), findings)
    data = None if root is None else _plain(root, "", findings)
    findings.raise_if_any()
    parsed, wrong = web_config.WebConfig.from_mapping(data, str(Path(path).parent))
    for key, message in wrong:
        node = _locate(root, key)
        findings.add(node.line, node.col, key or DOCUMENT, message)
    findings.raise_if_any()
    return parsed or web_config.WebConfig()


def _parse(path: str) -> tuple[web_config.WebConfig | None, list[web_config.Finding]]:
    try:
        return read_web_config(path), []
    except ConfigError as error:
        return None, [
            web_config.Finding(f"{one.line}:{one.col}: {one.path}", one.message) for one in error.findings
        ]
    except UnreadableConfig as error:
        return None, [web_config.Finding("", str(error))]


def _plain(node: Node, path: str, findings: Findings) -> Any:
    """Dictionaries, lists and texts, as YAML would give them; a key that stands twice is a finding."""
    if isinstance(node, ListNode):
        return [_plain(one, path, findings) for one in node.items]
    if isinstance(node, MapNode):
        return _plain_map(node, path, findings)
    if not isinstance(node, ScalarNode) or node.is_null:
        return None
    if node.is_boolean:
        return node.text.lower() in ("true", "yes", "on")
    return float(node.text) if node.plain and is_number(node.text) else node.text


def _plain_map(node: MapNode, path: str, findings: Findings) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in node.pairs:
        name = key.text if isinstance(key, ScalarNode) else "?"
        here = f"{path}.{name}" if path else name
        if name in result:
            findings.add(key.line, key.col, here, "stands here twice")
        result[name] = _plain(value, here, findings)
    return result


def _locate(root: Node | None, path: str) -> Node:
    """The node a dotted path leads to, or the last one on the way."""
    node = root or MapNode(1, 1)
    rest = path
    while isinstance(node, MapNode) and rest:
        step = next(((key, value) for key, value in node.pairs if _leads(key, rest)), None)
        if step is None:
            break
        key, value = step
        rest = rest[len(key.text) + 1 :] if isinstance(key, ScalarNode) else ""
        node = value if rest else key
    return node


def _leads(key: Node, path: str) -> bool:
    return isinstance(key, ScalarNode) and (path == key.text or path.startswith(f"{key.text}."))
