"""What config.json of a result says to transformers: its weights are packed, and who reads them.

transformers skips a quantization method that it does not know, with a warning, and looks for plain weights.
`transformers_weights` names the file that it looks for. Ours is none, so that it stops with an error that
quotes it; the quantizer (quant/from_pretrained.py) puts the real file's name there.

Note: the quantizer is imported while transformers is, so nothing is imported from it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHOD = "mrem"
QUANTIZATION, WEIGHTS = "quantization_config", "transformers_weights"
KEYS: Mapping[str, Any] = {
    QUANTIZATION: {"quant_method": METHOD, "format_version": 1},
    WEIGHTS: "the weights are packed: install mrem-deploy and `import mrem_deploy` first",
}


def without_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as of a full-precision model. Other values of these keys stay, for the gate to refuse."""
    return {key: value for key, value in content.items() if key not in KEYS or value != KEYS[key]}
