"""Post-training quantization of BERT-like language models by module-wise reconstruction error minimization.

`mrem_deploy.load(folder)` gives a quantized model back. Importing this package loads neither torch nor a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrem_deploy.quant.artifact import load as load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from mrem_deploy.quant.artifact import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
