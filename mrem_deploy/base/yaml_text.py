"""YAML that reads back as the same values, and YAML inside pages, in which nothing reads as HTML."""

from __future__ import annotations

from typing import Any

import yaml

BREAKS = "\x85\u2028\u2029"  # PyYAML writes these line breaks as they are, and reads them as spaces
MARKUP = "<>&"
_ESCAPES = {ord(character): f"\\x{ord(character):02X}" for character in MARKUP}


class _Dumper(yaml.SafeDumper):
    """Puts texts with one of `escaped` into double quotes, where it can be escaped; writes no anchors."""

    escaped = BREAKS

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _PageDumper(_Dumper):
    escaped = BREAKS + MARKUP


def _represent(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if set(dumper.escaped) & set(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)
_PageDumper.add_representer(str, _represent)


def dump_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def page_yaml(values: dict[str, Any]) -> str:
    """The same for pages: a reader of Markdown that knows no front matter shows it as part of the page."""
    return yaml.dump(values, Dumper=_PageDumper, sort_keys=False, allow_unicode=True).translate(_ESCAPES)
