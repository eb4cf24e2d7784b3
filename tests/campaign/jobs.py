"""The commands that the campaign disturbs: tiny models and data, in a second or two each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HEADS = ("text-classification", "squad", "token-classification")
TASKS = (*HEADS, "retrieval", "reranking")  # each with a model and data of its name
OUT = "out"  # the result folder of every job, in the place of its case
SMALL = "--steps 6 --checkpoint-steps 2 --calib-size 32 --batch-size 8 --max-length 32 --init-batches 2"
SMALL += " --modules 2 --threads 1"
# A file that every complete result of a command has, and that differs between two of them.
MARKERS = {
    "quantize": "mrem.safetensors",
    "finetune": "finetune.json",
    "web": "site.json",
    "beir": "corpus.jsonl",
}


@dataclass(frozen=True)
class Job:
    """A command that writes a folder: its options, and what is promised of one that was interrupted."""

    name: str
    verb: str
    options: str
    head: str = "text-classification"
    same_bits: bool = True
    crew: bool = False  # several processes
    older: str = ""  # the job whose result it may replace
    result: str = ""  # the job whose result it reads

    @property
    def once(self) -> bool:
        """Whether it refuses to replace what it has written."""
        return self.verb == "beir"

    @property
    def marker(self) -> str:
        return MARKERS[self.verb]

    def argv(self, shop: Path, out: Path) -> list[str]:
        if self.verb == "web":
            places = [str(result_of(shop, self.result)), "--libraries", str(shop / "npm")]
        elif self.verb == "beir":
            places = [str(shop / "data-squad")]
        else:
            places = ["--model", str(shop / f"model-{self.head}"), "--data", str(shop / f"data-{self.head}")]
            places += ["--task", self.head]
        return [self.verb, *places, "--out", str(out), *self.options.split()]


def result_of(shop: Path, name: str) -> Path:
    """What the undisturbed run of a job has written."""
    return shop / "baselines" / name / "work" / OUT


JOBS = {
    job.name: job
    for job in (
        Job("mrem-s", "quantize", f"{SMALL} --lr 1e-3 --method mrem-s --export none", older="ptq"),
        Job(
            "mrem-s-onnx",
            "quantize",
            f"{SMALL} --lr 1e-3 --method mrem-s --bits 2-2-8",
            head="squad",
            older="ptq",
        ),
        Job(
            "mrem-s-auto",
            "quantize",
            f"{SMALL} --lr 1e-3 --method mrem-s --bits auto-8 --budget-mb 0.0175 --export none",
            head="token-classification",
            older="ptq",
        ),
        Job("rem", "quantize", f"{SMALL} --lr 1e-3 --method rem --bits 2-2-8 --export none", older="ptq"),
        Job(
            "qat",
            "quantize",
            f"{SMALL} --method qat --qat-epochs 1+1 --train-size 32 --export none",
            older="ptq",
        ),
        Job("ptq", "quantize", f"{SMALL} --lr 1e-3 --method ptq", older="mrem-s"),
        Job(
            "mrem-cpu",
            "quantize",
            f"{SMALL} --method ptq --bits 2-2-8 --hot-rows 4 --export ort-cpu,mrem-cpu",
            older="ptq",
        ),
        Job(
            "embedder",
            "quantize",
            f"{SMALL} --lr 1e-3 --method mrem-s --threshold 0.4 --export ort-cpu",
            head="retrieval",
            older="ptq",
        ),
        Job(
            "reranker",
            "quantize",
            f"{SMALL} --method ptq --threshold 0.8 --export ort-cpu",
            head="reranking",
            older="ptq",
        ),
        Job("web", "web", "--title newer", older="web-older", result="ptq"),
        Job("web-older", "web", "--title older", result="ptq"),
        Job("beir", "beir", "--train-questions 0 --negatives 2"),
        Job(
            "finetune",
            "finetune",
            "--epochs 1 --batch-size 8 --max-length 32 --checkpoint-steps 2 --lr 1e-3",
        ),
        Job(
            "mrem-p-lock-step",
            "quantize",
            f"{SMALL} --lr 1e-3 --method mrem-p --deterministic --workers 2 --export none",
            crew=True,
        ),
        Job(
            "mrem-p-free",
            "quantize",
            f"{SMALL} --lr 1e-3 --method mrem-p --workers 2 --export none",
            same_bits=False,
            crew=True,
        ),
    )
}
ALONE = tuple(name for name, job in JOBS.items() if not job.crew and name != "web-older")
CREWS = tuple(name for name, job in JOBS.items() if job.crew)
