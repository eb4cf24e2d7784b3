"""README.md of a result folder: a model card that the hub understands."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrem_deploy.base.format import is_number, mib
from mrem_deploy.base.tables import Table, md, md_table
from mrem_deploy.base.yaml_text import page_yaml
from mrem_deploy.evaluate.accuracy import BY_ONNXRUNTIME, QUANTIZED, Accuracy
from mrem_deploy.evaluate.metrics import metric_of
from mrem_deploy.export import PROFILES
from mrem_deploy.models.sentence_files import MODULES
from mrem_deploy.report.origin import generated_notes
from mrem_deploy.report.summary import (
    Summary,
    bits_words,
    data_words,
    hub_id,
    model_name,
    next_to_words,
)
from mrem_deploy.result import METRICS, PLOTS, RECIPE, REPORT_HTML, Metrics, Onnx

# The hub's names of what a model does; text-classification for tasks that are not here.
_PIPELINES = {
    "feature-extraction": "feature-extraction",
    "retrieval": "sentence-similarity",
    "reranking": "text-ranking",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
    "squad": "question-answering",
    "squad_v2": "question-answering",
}
# What transformers.js calls a pipeline, where the hub has another name.
_IN_BROWSERS = {"sentence-similarity": "feature-extraction", "text-ranking": "text-classification"}
MODULES_TAG, BROWSER_TAG = "sentence-transformers", "transformers.js"
_GLUE = ("mnli", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")

# A result in plain onnxruntime; the project's README shows the same lines.
ONNX_USE = """\
import numpy as np
import onnxruntime
from transformers import AutoTokenizer

folder = "path/to/this/folder"
session = onnxruntime.InferenceSession(f"{folder}/FILE", providers=["CPUExecutionProvider"])
tokenizer = AutoTokenizer.from_pretrained(folder)
tokens = tokenizer(["A sentence to try it on."], padding=True, truncation=True, return_tensors="np")
inputs = {entry.name: tokens[entry.name].astype(np.int64) for entry in session.get_inputs()}
print(dict(zip([entry.name for entry in session.get_outputs()], session.run(None, inputs))))
"""


def model_card(
    folder: Path, metrics: Metrics, summary: Summary, making: Sequence[Table], plots: Sequence[str]
) -> str:
    """README.md: YAML front matter for the hub, then how to use the model and what it scores."""
    front = page_yaml(_front_matter(folder, metrics))
    bits = metrics.bits or "?"
    images = [f"![{stem.replace('_', ' ')}]({PLOTS}/{stem}.png)" for stem in plots]
    body = [
        f"# {md(model_name(metrics.model))}, {md(bits)} bits",
        md(summary.sentence),
        md(summary.verdict),
        "## Use",
        "```python\n"
        "import mrem_deploy\n"
        "from transformers import AutoTokenizer\n\n"
        'folder = "path/to/this/folder"\n'
        "model = mrem_deploy.load(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        'outputs = model(**tokenizer("A sentence to try it on.", return_tensors="pt"))\n'
        "```",
        f"The weights are stored as packed integers ({md(bits_words(bits, metrics.hot_rows))}). "
        f"{_what_is_scored(metrics)}",
        *_onnx_use(metrics.onnx),
        _runtime_use(metrics),
        *_ready_use(metrics),
        "## Results",
        md_table(summary.scores),
        *images,
        "## How it was made",
        *map(md_table, making),
        f"The options are in `{RECIPE}`; `python -m mrem_deploy.quantize --config {RECIPE}` runs them "
        f"again. All numbers are in `{METRICS}`, all curves in `{REPORT_HTML}`.",
        "## Limits",
        "The scores above hold for this task and data. A low-bit model can lose more on text that differs "
        "from the calibration texts: evaluate it on your own data before you rely on it. The biases and the "
        "licence of the original model carry over.",
        *generated_notes(metrics.data),
    ]
    return f"---\n{front}---\n\n" + "\n\n".join(part for part in body if part) + "\n"


def _what_is_scored(metrics: Metrics) -> str:
    if metrics.onnx is None or metrics.accuracy.scored_by != BY_ONNXRUNTIME:
        return "`mrem_deploy.load` returns exactly the model that is evaluated below."
    return (
        f"The scores below are those of `{md(metrics.onnx.file)}` in onnxruntime; `mrem_deploy.load` returns "
        "the same model in torch."
    )


def _onnx_use(onnx: Onnx | None) -> list[str]:
    """How to run the exported file, if there is one."""
    if onnx is None:
        return []
    return [
        f"`{md(onnx.file)}` ({mib(onnx.size_mb)}) runs in plain onnxruntime, without torch and without this "
        "package:",
        f"```python\n{ONNX_USE.replace('FILE', onnx.file)}```",
    ]


def _runtime_use(metrics: Metrics) -> str:
    """The same model in the CPU runtime, if there is a file for it."""
    fused = metrics.runtime
    if fused is None:
        return ""
    line = (
        f"`{md(fused.file)}` ({mib(fused.size_mb)}) is the same model for `mrem-runtime`, which computes on "
        f'packed weights and skips padding: `session = mrem_runtime.session(f"{{folder}}/{fused.file}")`. '
        "Without that package it runs like the other file."
    )
    found = fused.next_to
    if found is None:
        return line
    return f"{line} In {md(found.runtime)}: {md(next_to_words(found, metrics.accuracy.metric))}."


def _ready_use(metrics: Metrics) -> list[str]:
    """The methods of sentence-transformers, for the results that have them."""
    use = _READY.get(metrics.task)
    if use is None or metrics.onnx is None:
        return []
    call = use.replace("FILE", metrics.onnx.file)
    return [
        "With the methods of sentence-transformers, and without that package:",
        f"```python\nimport mrem_deploy\n\nmodel = mrem_deploy.{call}\n```",
    ]


_EMBEDDER = (
    'sentence_transformer("path/to/this/folder", model_file="FILE")\n'
    'vectors = model.encode(["A sentence to try it on.", "Another one."])\n'
    "print(model.similarity(vectors, vectors))"
)
_READY = {
    "feature-extraction": _EMBEDDER,
    "retrieval": _EMBEDDER,
    "reranking": (
        'cross_encoder("path/to/this/folder", model_file="FILE")\n'
        'print(model.rank("A query", ["A passage.", "Another one."]))'
    ),
}


def browser_card(result: Path, metrics: Metrics, file: str, dtype: str) -> str:
    """README.md of the folder for transformers.js: the same scores, and only what is true of that folder."""
    front = _front_matter(result, metrics)
    kind = front["pipeline_tag"]
    tags = [tag for tag in front["tags"] if tag not in ("onnx", MODULES_TAG, BROWSER_TAG)]
    front |= {"library_name": BROWSER_TAG, "tags": [*tags, "onnx", BROWSER_TAG]}
    body = [
        f"# {md(model_name(metrics.model))}, {md(metrics.bits or '?')} bits, for the browser",
        f"`{file}` runs in transformers.js and onnxruntime-web, with the integers and scales of the model "
        "that was scored; floats round a little differently there. `config.json` names the dtype, so no "
        "option is needed:",
        "```js\n"
        'import { pipeline } from "@huggingface/transformers";\n\n'
        f'const model = await pipeline("{_IN_BROWSERS.get(kind, kind)}", "path/to/this/folder", '
        '{ device: "wasm" });\n'
        "```",
        f"Elsewhere the file has the dtype `{dtype}`. These are not the block formats that usually have this "
        "name: weights have learned scales, and matmuls multiply integers.",
    ]
    return f"---\n{page_yaml(front)}---\n\n" + "\n\n".join(body) + "\n"


def _front_matter(folder: Path, metrics: Metrics) -> dict[str, Any]:
    task, bits = metrics.task, metrics.bits or "?"
    config = _config(folder)
    # `_name_or_path` is what the original was made from, where the original itself is a local folder.
    itself = metrics.base_model or hub_id(metrics.model)
    base = itself or hub_id(config.get("_name_or_path"))
    licence = metrics.license or config.get("license")
    kind = _PIPELINES.get(task, "text-classification")
    scores = _hub_scores(metrics.accuracy)
    front: dict[str, Any] = {
        "base_model": str(base) if base else None,
        "base_model_relation": "quantized" if itself else "finetune" if base else None,
        "license": str(licence) if licence else None,
        "library_name": "mrem_deploy",
        "pipeline_tag": kind,
        "tags": [
            "quantized",
            "post-training-quantization",
            "mrem",
            _slug(metrics.method),
            bits,
            *(["onnx"] if metrics.onnx else []),
            *([MODULES_TAG] if (folder / MODULES).is_file() else []),
            *([BROWSER_TAG] if PROFILES["web"].path_in(folder).is_file() else []),
        ],
        "metrics": sorted({metric["type"] for _, metric in scores}) or None,
    }
    glue, data = task in _GLUE, data_words(metrics.data)
    results = []
    for split in dict.fromkeys(split for split, _ in scores):
        dataset = {"type": _slug(data), "name": data, "split": split}
        if glue:
            official = {"dev": "validation"}.get(split, f"validation_{split}")
            dataset = {"type": "nyu-mll/glue", "name": f"GLUE {task}", "config": task, "split": official}
        entries = [metric for where, metric in scores if where == split]
        results.append({"task": {"type": kind}, "dataset": dataset, "metrics": entries})
    if results:
        name = model_name(metrics.model).rpartition("/")[2]
        front["model-index"] = [{"name": f"{name}-{bits}", "results": results}]
    return {key: value for key, value in front.items() if value is not None}


def _hub_scores(accuracy: Accuracy) -> list[tuple[str, dict[str, Any]]]:
    """(split, metric) for every finite score of the quantized model; the hub refuses NaN."""
    found = []
    for name, split in accuracy.splits.items():
        for metric, value in split.scores.get(QUANTIZED, {}).items():
            if is_number(value) and metric_of(metric).shown:
                entry = {
                    "type": metric_of(metric).hub_name,
                    "name": metric_of(metric).title,
                    "value": round(float(value), 4),
                }
                found.append((name, entry))
    return found


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-.")[:96] or "unknown"


def _config(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
