"""YAML inside pages: text in which nothing reads as HTML, and which loads as the same values."""

from __future__ import annotations

from typing import Any

import yaml

_ESCAPES = {ord("<"): r"\x3C", ord(">"): r"\x3E", ord("&"): r"\x26"}


class _Quoting(yaml.SafeDumper):
    """Puts texts with <, > or & into double quotes, where they can be escaped; writes no anchors (&)."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if set("<>&") & set(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Quoting.add_representer(str, _quoted)


def page_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML. A reader of Markdown that knows no front matter would show it as part of the page."""
    return yaml.dump(values, Dumper=_Quoting, sort_keys=False, allow_unicode=True).translate(_ESCAPES)
