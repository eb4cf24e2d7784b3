"""From a frozen model to ONNX: `export_onnx` traces the skeleton, lowers it and writes the file.

The walk: skeleton.py (Hugging Face's forward code, with markers) → lower.py (markers → operators, as
profiles.py says) → tensors.py (integers as packed initializers) → one file.
"""

from __future__ import annotations

from mrem_deploy.export.profiles import PROFILES, Profile
from mrem_deploy.export.write import export_onnx

__all__ = ["PROFILES", "Profile", "export_onnx"]
