"""One static folder: the page, its libraries and the model in the layout of transformers.js.

index.html, app.js, …      as in `page/`, the same for every model
site.json                  what the page must know of this one (`settings.py`)
vendor/                    the libraries (`libraries.py`)
model/                     config.json, tokenizer and onnx/model_q4.onnx (`export/transformers_js.py`)
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from mrem_deploy.base.files import atomic_folder, write_json
from mrem_deploy.base.outside import path_of
from mrem_deploy.base.progress import say
from mrem_deploy.export.transformers_js import check_tokenizer, fill_layout
from mrem_deploy.preflight import check_out
from mrem_deploy.quant.frozen import FrozenModel
from mrem_deploy.web import libraries, settings

PAGE = Path(__file__).parent / "page"
SITE, VENDOR, MODEL = "site.json", "vendor", "model"


@dataclass(frozen=True)
class Site:
    """A folder that was written."""

    folder: Path
    file: Path  # the ONNX model
    file_bytes: int
    bytes: int  # all that a visitor downloads


def build_site(
    result: str | Path,
    out: str | Path,
    title: str | None = None,
    texts: str | Path | None = None,
    given: str | None = None,
) -> Site:
    """Write the page for a result folder. All that can be wrong is refused before the model is traced."""
    source = path_of("DIR", result)
    folder = check_out(str(out), {}, marker=SITE)
    frozen = FrozenModel.read(source)
    kind = settings.kind_of(frozen)
    check_tokenizer(source)
    recipe = settings.recipe_of(source)
    pair = settings.reads_pairs(recipe)
    shown = settings.read_texts(path_of("--texts", texts), pair) if texts is not None else None
    vectors = settings.vectors_of(source) if kind == "embedding" else None
    vendored = libraries.libraries(given)
    say("exporting to ONNX, profile web")
    with atomic_folder(folder) as new:
        file = f"{MODEL}/{fill_layout(frozen, source, new / MODEL)}"
        shutil.copytree(PAGE, new, dirs_exist_ok=True)
        shutil.copytree(vendored, new / VENDOR)
        size = (new / file).stat().st_size
        runtime = libraries.sizes(vendored)[libraries.RUNTIME]
        name = title or source.resolve().name
        content = settings.settings(
            frozen, recipe, name, file, size, runtime, vectors, shown, libraries.versions()
        )
        write_json(new / SITE, content)
        total = sum(path.stat().st_size for path in new.rglob("*") if path.is_file())
    return Site(folder, folder / file, size, total)
