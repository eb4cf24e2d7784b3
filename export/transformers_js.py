"""A folder as transformers.js reads it: `onnx/model_q4.onnx` (or `_q2`, `_quantized`), config, tokenizer.

config.json also names the dtype, so that `pipeline(task, folder)` finds the file without being told.
`mrem-web.json` says what the folder holds; by it the next export knows that it may replace the folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mrem_deploy
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.files import atomic_folder, write_json, write_text
from mrem_deploy.base.strict_json import read_object
from mrem_deploy.export.profiles import find_profile
from mrem_deploy.export.skeleton import Skeleton
from mrem_deploy.export.write import bits_of, export_onnx
from mrem_deploy.models import gate, packed
from mrem_deploy.models.architectures import has_decoder
from mrem_deploy.quant.frozen import FrozenModel

PROFILE = "web"
NOTE = "mrem-web.json"
README = "README.md"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, gate.TOKENIZER_CONFIG, "special_tokens_map.json")  # the first two are needed
DTYPES = {"model_q2": "q2", "model_q4": "q4", "model_quantized": "q8"}  # what transformers.js calls the files
Card = Callable[[str, str], str]  # a model card, for a file of a dtype
COPY_AGAIN = "copy the entire result folder again, or quantize again"


def dtype_of(file: str) -> str:
    """The dtype under which transformers.js looks for a file of the profile."""
    return DTYPES[Path(file).stem]


def check_tokenizer(folder: Path) -> None:
    """Refuse a result whose tokenizer JavaScript cannot read."""
    for name in TOKENIZER_FILES[:2]:
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}, which the tokenizer in the browser is made from",
                "save the model's tokenizer in its fast form and quantize again: "
                'AutoTokenizer.from_pretrained("MODEL").save_pretrained("MODEL")',
            )


def _check_kind(model_type: str) -> None:
    if has_decoder(model_type):
        raise UserError(
            f"transformers.js reads a {model_type} with its decoder, and this is the encoder alone",
            "in a browser use `mrem web`, or an ONNX file in onnxruntime-web: mrem quantize --export web",
        )


def write_layout(
    frozen: FrozenModel,
    result: Path,
    out: Path,
    opset: int | None = None,
    skeleton: Skeleton | None = None,
    card: Card | None = None,
) -> Path:
    """Write the folder `out` from the result folder that `frozen` was read from; returns the ONNX file.

    The folder is replaced in one step, with all that was in it. `card` writes its README.md.
    """
    check_tokenizer(result)
    _check_kind(frozen.config.model_type)
    with atomic_folder(out) as folder:
        file = fill_layout(frozen, result, folder, opset, skeleton)
        if card is not None:
            write_text(folder / README, card(file, dtype_of(file)))
    return out / file


def fill_layout(
    frozen: FrozenModel,
    result: Path,
    folder: Path,
    opset: int | None = None,
    skeleton: Skeleton | None = None,
) -> str:
    """The same into a folder that is being made; returns the name of the ONNX file in it."""
    file = find_profile(PROFILE).file_for(bits_of(frozen))
    export_onnx(frozen, folder / file, PROFILE, opset, skeleton)
    config = packed.without_keys(read_object(gate.inside(result, gate.CONFIG), COPY_AGAIN))
    write_json(folder / gate.CONFIG, config | {"transformers.js_config": {"dtype": dtype_of(file)}})
    for name in TOKENIZER_FILES:
        if (result / name).is_file():
            shutil.copyfile(gate.inside(result, name), folder / name)
    write_json(folder / NOTE, note(frozen, file))
    return file


def note(frozen: FrozenModel, file: str) -> dict[str, Any]:
    """Where the folder comes from."""
    return {
        "made_by": f"mrem_deploy {mrem_deploy.__version__}",
        "file": file,
        "dtype": dtype_of(file),
        "bits": frozen.notes.get("bits"),
        "result_digest": frozen.digest,
    }
