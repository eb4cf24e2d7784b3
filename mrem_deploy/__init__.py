"""Post-training quantization of BERT-type encoders, to 2, 4 or 8 bits, and their export to ONNX.

    import mrem_deploy as mrem

    result = mrem.run(mrem.Recipe(model="my-bert", task="sst2", data="glue/SST-2", out="result"))
    frozen = mrem.quantize_model(model, tokenizer, sentences, mrem.Recipe(bits="2-2-8", steps=500))

See docs/api.md. Importing this package loads neither torch nor a GPU: names load what they need when used.
It also lets transformers read results: `AutoModelForSequenceClassification.from_pretrained("result")`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mrem_deploy.base import early
from mrem_deploy.base.after_import import after_import

if TYPE_CHECKING:
    from mrem_deploy.api import quantize_model as quantize_model
    from mrem_deploy.base.errors import UserError as UserError
    from mrem_deploy.deploy.embedder import sentence_transformer as sentence_transformer
    from mrem_deploy.deploy.reranker import cross_encoder as cross_encoder
    from mrem_deploy.export import export_onnx as export_onnx
    from mrem_deploy.pipeline import run as run
    from mrem_deploy.quant.frozen import load as load
    from mrem_deploy.recipe import Recipe as Recipe
    from mrem_deploy.result import open_result as open_result

__version__ = "0.1.0"

if early.is_command(__name__):  # not when another program imports the package
    early.listen()


def _register_quantizer() -> None:
    importlib.import_module("mrem_deploy.quant.from_pretrained").register()


after_import("transformers.quantizers.auto", _register_quantizer)

_HOMES = {
    "Recipe": "mrem_deploy.recipe",
    "run": "mrem_deploy.pipeline",
    "quantize_model": "mrem_deploy.api",
    "open_result": "mrem_deploy.result",
    "load": "mrem_deploy.quant.frozen",
    "export_onnx": "mrem_deploy.export",
    "sentence_transformer": "mrem_deploy.deploy.embedder",
    "cross_encoder": "mrem_deploy.deploy.reranker",
    "UserError": "mrem_deploy.base.errors",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
