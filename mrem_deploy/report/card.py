"""README.md of a result folder: a model card that the hub understands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mrem_deploy.base.format import is_number, mb
from mrem_deploy.base.tables import Table, md, md_table
from mrem_deploy.report.summary import (
    METRIC_NAMES,
    Summary,
    bits_text,
    bits_words,
    data_words,
    hub_id,
    model_name,
)

_HUB_METRICS = {"matthews": "matthews_correlation", "spearman": "spearmanr", "pearson": "pearsonr"}


_NOT_CLASSES = ("feature-extraction", "token-classification", "question-answering")  # also names of pipelines


_SQUAD = ("squad", "squad_v2")


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


_GLUE = ("mnli", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")


def model_card(
    folder: Path, metrics: Mapping[str, Any], summary: Summary, making: Sequence[Table], plots: Sequence[str]
) -> str:
    """README.md: YAML front matter the hub understands, then how to use the model and what it is worth."""
    front = yaml.safe_dump(_front_matter(folder, metrics), sort_keys=False, allow_unicode=True)
    bits = bits_text(metrics)
    images = [f"![{stem.replace('_', ' ')}](plots/{stem}.png)" for stem in plots]
    body = [
        f"# {md(model_name(metrics))}, {md(bits)} bits",
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
        f"The weights are stored as packed integers ({md(bits_words(bits))}); `mrem_deploy.load` gives the "
        "model back exactly as it was evaluated below.",
        *_onnx_use(metrics.get("onnx") or {}),
        "## Results",
        md_table(summary.scores),
        *images,
        "## How it was made",
        *map(md_table, making),
        "The settings are in `recipe.yaml`; `python -m mrem_deploy.quantize --config recipe.yaml` repeats "
        "them. All numbers are in `metrics.json`, and in `report.html` with every curve.",
        "## Limits",
        "The figures above hold for this task and data. Low-bit models can lose more on text unlike the "
        "calibration texts: evaluate on your own before relying on it. Biases and licence of the original "
        "model carry over.",
    ]
    return f"---\n{front}---\n\n" + "\n\n".join(part for part in body if part) + "\n"


def _onnx_use(onnx: Mapping[str, Any]) -> list[str]:
    """How to run the exported file, where there is one."""
    if not onnx.get("file"):
        return []
    return [
        f"`{md(str(onnx['file']))}` ({mb(onnx.get('size_mb'))}) runs in plain onnxruntime, without torch and "
        "without this package:",
        f"```python\n{ONNX_USE.replace('FILE', str(onnx['file']))}```",
    ]


def _front_matter(folder: Path, metrics: Mapping[str, Any]) -> dict[str, Any]:
    model, task = metrics.get("model"), str(metrics.get("task") or "")
    known = model if isinstance(model, Mapping) else {}
    config = _config(folder)
    base = (
        known.get("base_model") or hub_id(known.get("name") or model) or hub_id(config.get("_name_or_path"))
    )
    licence = known.get("license") or config.get("license")
    accuracy = metrics.get("accuracy") or {}
    kind = "question-answering" if task in _SQUAD else task if task in _NOT_CLASSES else "text-classification"
    scores = _hub_scores(accuracy)
    front: dict[str, Any] = {
        "base_model": str(base) if base else None,
        "base_model_relation": "quantized" if base else None,
        "license": str(licence) if licence else None,
        "library_name": "mrem_deploy",
        "pipeline_tag": kind,
        "tags": [
            "quantized",
            "post-training-quantization",
            "mrem",
            _slug(str(metrics.get("method"))),
            bits_text(metrics),
        ],
        "metrics": sorted({metric["type"] for _, metric in scores}) or None,
    }
    glue, data = task in _GLUE, data_words(metrics)
    results = []
    for split in dict.fromkeys(split for split, _ in scores):
        dataset = {"type": _slug(data), "name": data, "split": split}
        if glue:
            official = {"dev": "validation"}.get(split, f"validation_{split}")
            dataset = {"type": "nyu-mll/glue", "name": f"GLUE {task}", "config": task, "split": official}
        entries = [metric for where, metric in scores if where == split]
        results.append({"task": {"type": kind}, "dataset": dataset, "metrics": entries})
    if results:
        name = model_name(metrics).rpartition("/")[2]
        front["model-index"] = [{"name": f"{name}-{bits_text(metrics)}", "results": results}]
    return {key: value for key, value in front.items() if value is not None}


def _hub_scores(accuracy: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(split, metric) for every finite score of the quantized model; the hub wants no NaN."""
    found = []
    for split, content in (accuracy.get("splits") or {}).items():
        for metric, value in (content.get("quantized") or {}).items():
            if is_number(value) and not metric.endswith("_thresh"):
                entry = {
                    "type": _HUB_METRICS.get(metric, metric),
                    "name": METRIC_NAMES.get(metric, metric),
                    "value": round(float(value), 4),
                }
                found.append((str(split), entry))
    return found


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-.")[:96] or "unknown"


def _config(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
