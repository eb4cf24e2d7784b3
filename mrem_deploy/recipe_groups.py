"""The groups of the recipe's options, and the longest of their help texts."""

from __future__ import annotations

# The groups of options in the order of `--help`, and what holds for the entire group.
MODEL, BITS, TRAINING, MREM_P = "model and data", "bits", "training", "mrem-p"
QAT, OUTPUT, MACHINE = "qat", "output", "machine"
GROUPS = {
    MODEL: "",
    BITS: "",
    TRAINING: "",
    MREM_P: "only with --method mrem-p",
    QAT: "only with --method qat",
    OUTPUT: "",
    MACHINE: "",
}

TASK_HELP = (
    "a GLUE task (sst2, mnli, …), squad, squad_v2, text-classification, token-classification, retrieval or "
    "reranking. Without labels: feature-extraction, question-answering, text-classification, "
    "token-classification and reranking; the score is then how well the quantized model agrees with the "
    "original"
)
DATA_HELP = (
    "folder, file or hub id of the task's data; none: calibrates with English text that the package makes "
    "itself, which may lose more (--eval-data then measures on real text)"
)
