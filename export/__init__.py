"""From a frozen model to ONNX files.

    export_onnx(frozen, path, profile)       one file
    export_all(frozen, folder, profiles)     one file for each profile, from one trace

The way: skeleton.py traces Hugging Face's forward code with markers in it, lower.py replaces the markers by
operators as profiles.py says, tensors.py packs the integers, write.py writes the file.

Importing this package loads neither torch nor onnx: the functions load them when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mrem_deploy.export.profiles import PROFILES, Profile

if TYPE_CHECKING:
    from mrem_deploy.export.write import export_all, export_onnx

__all__ = ["PROFILES", "Profile", "export_all", "export_onnx"]


def __getattr__(name: str) -> Any:
    if name in ("export_all", "export_onnx"):
        from mrem_deploy.export import write

        return getattr(write, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
