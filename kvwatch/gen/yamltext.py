"""How are generated YAML files written? In the order given, with a header that says where from."""

from __future__ import annotations

import yaml

HEADER = (
    "# Made by `kvwatch gen` from kvwatch/catalogue. Do not edit; change the catalogue and run it again.\n"
)


class _Dumper(yaml.SafeDumper):
    """Indents lists below their key and writes long texts folded."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = ">" if len(value) > 90 and "\n" not in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dump(document: object, note: str = "") -> str:
    """One document; `note` is a further comment (lines without `#`)."""
    comment = "".join(f"# {line}\n" if line else "#\n" for line in note.splitlines())
    body = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True, default_flow_style=False
    )
    return HEADER + comment + body
