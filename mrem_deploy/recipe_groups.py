"""The groups of the recipe's options."""

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
