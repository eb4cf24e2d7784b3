"""The paper's numbers, typed from its tables and text; each has its label in the LaTeX source next to it.

Bai et al., "Towards Efficient Post-training Quantization of Pre-trained Language Models". Times are minutes
on V100 GPUs, memory is GB of one GPU (of each of four for MREM-P), ± is the standard deviation over ten
calibration sets. Nothing here is measured by us, and nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A printed number; std where the paper gives one."""

    value: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.1f}" if self.std is None else f"{self.value:.1f} ± {self.std:.1f}"


@dataclass(frozen=True)
class MainRow:
    """One method of the main tables; `scores` are matched and mismatched accuracy, or EM and F1."""

    minutes: float
    gigabytes: float
    thousands: float  # of training examples
    scores: tuple[Figure, Figure]


BASE, LARGE = "BERT-base", "BERT-large"
PAPER_MODELS = {"bert-base": BASE, "bert-large": LARGE}  # by the names of --geometry
FULL_ROW = "full", "-"  # bits and method of the first row of every main table

# bits, method | time, memory, data, scores of BERT-base | the same of BERT-large
_MNLI = """
full  -            220      8.6      393     84.5     84.9 |     609     21.5      393     86.7     85.9
4-4-8 qat         1320     11.9      393     84.6     84.9 |    3180     29.8      393     86.9     86.7
4-4-8 rem           28      2.5        4 73.3±0.3 74.9±0.2 |      84      5.5        4 70.0±0.4 71.8±0.3
4-4-8 mrem-s        36      4.6        4 83.5±0.1 83.9±0.1 |      84     10.8        4 86.1±0.1 85.9±0.1
4-4-8 mrem-p         9      3.7        4 83.4±0.1 83.7±0.1 |      21      8.6        4 85.5±0.1 85.4±0.2
2-2-8 qat          882     11.9      393     84.4     84.6 |    2340     29.8      393     86.5     86.1
2-2-8 rem           24      2.5        4 71.6±0.4 73.4±0.4 |      64      5.5        4 66.9±0.4 68.6±0.7
2-2-8 mrem-s        24      4.6        4 82.7±0.2 82.7±0.2 |      64     10.8        4 85.4±0.2 85.3±0.2
2-2-8 mrem-p         6      3.7        4 82.3±0.2 82.6±0.2 |      16      8.6        4 84.6±0.2 84.6±0.1
2-2-4 qat          875     11.9      393     83.5     84.2 |    2280     29.8      393     85.8     85.9
2-2-4 rem           24      2.5        4 58.3±0.5 60.6±0.6 |      64      5.5        4 48.8±0.6 51.4±0.8
2-2-4 mrem-s        24      4.6        4 81.1±0.2 81.5±0.2 |      64     10.8        4 83.6±0.2 83.7±0.2
2-2-4 mrem-p         6      3.7        4 80.8±0.2 81.2±0.2 |      16      8.6        4 83.0±0.3 83.2±0.2
"""  # tab:main_mnli
_SQUAD_1 = """
full  -            177     11.7       88     81.5     88.7 |     488     30.4       88     86.9     93.1
4-4-8 qat          428     18.4       88     80.2     87.9 |    1920     27.0       88     86.7     93.0
4-4-8 rem           65      3.1        4 46.1±0.5 60.0±0.5 |     175      7.3        4 68.3±0.1 79.3±0.1
4-4-8 mrem-s        76      6.4        4 79.4±0.1 87.2±0.1 |     200     14.5        4 86.2±0.1 92.5±0.1
4-4-8 mrem-p        19      5.5        4 79.6±0.1 87.3±0.1 |      50     12.3        4 86.0±0.1 92.4±0.1
2-2-8 qat          335     18.4       88     79.3     87.2 |    1200     27.0       88     86.1     92.5
2-2-8 rem           60      3.1        4 40.1±0.4 55.0±0.4 |     160      7.3        4 66.4±0.5 77.7±0.3
2-2-8 mrem-s        60      6.4        4 77.8±0.2 86.0±0.1 |     156     14.5        4 85.4±0.1 91.9±0.1
2-2-8 mrem-p        15      5.5        4 77.7±0.2 85.9±0.2 |      39     12.3        4 85.3±0.2 91.8±0.1
2-2-4 qat          331     18.4       88     77.1     85.9 |    1186     27.0       88     84.7     93.1
2-2-4 rem           60      3.1        4 10.4±0.2 24.6±0.2 |     160      7.3        4 28.3±0.6 45.0±0.5
2-2-4 mrem-s        60      6.4        4 72.7±0.2 82.5±0.2 |     156     14.5        4 81.4±0.3 89.4±0.2
2-2-4 mrem-p        15      5.5        4 73.0±0.3 82.7±0.2 |      39     12.3        4 81.8±0.3 89.6±0.2
"""  # tab:main_squad1.1
_SQUAD_2 = """
full  -            255     11.7      130     74.5     77.7 |     730     30.4      130     77.7     81.0
4-4-8 qat          662     18.4      130     74.4     77.5 |    2820     28.3      130     77.4     80.5
4-4-8 rem           60      3.1        4 53.1±0.4 53.6±0.4 |     175      7.3        4 58.2±0.2 61.4±0.3
4-4-8 mrem-s        76      6.4        4 73.0±0.1 76.3±0.1 |     200     14.5        4 76.4±0.1 79.7±0.1
4-4-8 mrem-p        19      5.5        4 72.6±0.2 75.9±0.2 |      50     12.3        4 76.3±0.1 79.6±0.1
2-2-8 qat          508     17.5      130     73.0     76.2 |    1680     28.3      130     76.7     80.0
2-2-8 rem           60      3.1        4 51.5±0.2 51.8±0.2 |     160      7.3        4 56.3±0.2 59.5±0.2
2-2-8 mrem-s        60      6.4        4 71.4±0.2 74.8±0.2 |     156     14.5        4 75.4±0.2 78.7±0.1
2-2-8 mrem-p        15      5.5        4 70.8±0.4 74.3±0.4 |      39     12.3        4 75.3±0.3 78.6±0.3
2-2-4 qat          505     17.5      130     71.4     74.6 |    1655     28.3      130     75.4     78.9
2-2-4 rem           60      3.1        4 39.3±1.5 41.4±1.3 |     160      7.3        4 42.9±0.8 44.2±0.7
2-2-4 mrem-s        60      6.4        4 67.2±0.3 70.6±0.2 |     156     14.5        4 71.3±0.3 74.8±0.2
2-2-4 mrem-p        15      5.5        4 66.1±0.5 69.8±0.5 |      39     12.3        4 71.5±0.3 75.0±0.3
"""  # tab:main_squad2.0


def figure(text: str) -> Figure:
    value, _, std = text.partition("±")
    return Figure(float(value), float(std) if std else None)


def _main(text: str) -> dict[str, dict[tuple[str, str], MainRow]]:
    table: dict[str, dict[tuple[str, str], MainRow]] = {BASE: {}, LARGE: {}}
    for line in text.strip().splitlines():
        left, right = line.split("|")
        bits, method, *base = left.split()
        for model, cells in ((BASE, base), (LARGE, right.split())):
            minutes, gigabytes, thousands, first, second = cells
            scores = figure(first), figure(second)
            row = MainRow(float(minutes), float(gigabytes), float(thousands), scores)
            table[model][bits, method] = row
    return table


# By task: the label of the table, the names of its two scores, and its rows by model, bits and method.
MAIN = {
    "mnli": ("tab:main_mnli", ("matched", "mismatched"), _main(_MNLI)),
    "squad": ("tab:main_squad1.1", ("exact", "f1"), _main(_SQUAD_1)),
    "squad_v2": ("tab:main_squad2.0", ("exact", "f1"), _main(_SQUAD_2)),
}

# tab:compare_sota
GLUE_TASKS = ("mnli", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")
_GLUE = """
full         full     418 no  84.9     91.4     92.1     93.2     59.7     90.1     86.3     72.2     83.9
Q-BERT       2-8-8    43  no  76.6     -        -        84.6     -        -        -        -        -
Q-BERT       2/4-8-8  53  no  83.5     -        -        92.6     -        -        -        -        -
Quant-Noise  PQ       38  no  83.6     -        -        -        -        -        -        -        -
TernaryBERT  2-2-8    28  no  83.3     90.1     91.1     92.8     55.7     87.9     87.5     72.9     82.7
gobo         3-4-32   43  yes 83.7     -        -        -        -        88.3     -        -        -
gobo         2-2-32   28  yes 71.0     -        -        -        -        82.7     -        -        -
mrem-s       4-4-8    50  yes 83.5±0.1 90.2±0.1 91.2±0.1 91.4±0.4 55.1±0.8 89.1±0.1 84.8±0.0 71.8±0.0 82.4±0.1
mrem-s       2-2-8    28  yes 82.7±0.2 89.6±0.1 90.3±0.2 91.2±0.4 52.3±1.0 88.7±0.1 86.0±0.0 71.1±0.0 81.5±0.2
mrem-p       4-4-8    50  yes 83.4±0.1 90.2±0.1 91.0±0.2 91.5±0.4 54.7±0.9 89.1±0.1 86.3±0.0 71.1±0.0 82.2±0.1
mrem-p       2-2-8    28  yes 82.3±0.2 89.4±0.1 90.3±0.2 91.3±0.4 52.9±1.2 88.3±0.2 85.8±0.0 72.9±0.0 81.6±0.2
"""


@dataclass(frozen=True)
class GlueRow:
    method: str
    bits: str
    megabytes: float
    post_training: bool
    scores: dict[str, Figure]  # by task; what the paper leaves out is missing
    average: Figure | None


def _glue() -> list[GlueRow]:
    rows = []
    for line in _GLUE.strip().splitlines():
        method, bits, size, post, *cells = line.split()
        shown = [None if cell == "-" else figure(cell) for cell in cells]
        scores = {task: cell for task, cell in zip(GLUE_TASKS, shown, strict=False) if cell is not None}
        rows.append(GlueRow(method, bits, float(size), post == "yes", scores, shown[-1]))
    return rows


GLUE = _glue()

# tab:teacher_forcing, accuracy on MNLI-m: (bits, steps) → by model, without and with teacher forcing
TEACHER_FORCING = {
    ("2-2-8", 250): {BASE: ("79.6±0.3", "80.7±0.2"), LARGE: ("82.1±0.4", "83.1±0.2")},
    ("2-2-8", 500): {BASE: ("81.0±0.3", "81.6±0.2"), LARGE: ("83.4±0.3", "84.1±0.3")},
    ("2-2-8", 2000): {BASE: ("82.2±0.2", "82.7±0.2"), LARGE: ("84.3±0.3", "84.6±0.2")},
    ("2-2-8", 4000): {BASE: ("82.3±0.3", "82.5±0.2"), LARGE: ("84.5±0.2", "84.7±0.2")},
    ("2-2-4", 250): {BASE: ("73.9±0.5", "77.3±0.4"), LARGE: ("76.5±0.9", "79.3±0.4")},
    ("2-2-4", 500): {BASE: ("77.9±0.2", "79.0±0.2"), LARGE: ("80.0±0.5", "81.4±0.2")},
    ("2-2-4", 2000): {BASE: ("80.4±0.2", "80.8±0.2"), LARGE: ("82.5±0.4", "83.0±0.3")},
    ("2-2-4", 4000): {BASE: ("80.7±0.2", "81.0±0.2"), LARGE: ("83.1±0.1", "83.3±0.3")},
}

# tab:REM_MREM, BERT-base on MNLI: (bits, method, long) → steps, minutes, GB, matched, mismatched. The table
# has 200 steps for the short REM, the text of its section 250.
REM_MREM = {
    ("4-4-8", "rem", False): (200, 36, 2.5, "73.3±0.3", "74.9±0.2"),
    ("4-4-8", "rem", True): (2000, 319, 2.5, "81.8±0.2", "82.5±0.1"),
    ("4-4-8", "mrem-s", True): (2000, 36, 4.6, "83.5±0.1", "83.9±0.1"),
    ("2-2-8", "rem", False): (200, 24, 2.5, "71.6±0.4", "73.4±0.4"),
    ("2-2-8", "rem", True): (2000, 213, 2.5, "78.7±0.2", "79.2±0.2"),
    ("2-2-8", "mrem-s", True): (2000, 24, 4.6, "82.7±0.2", "82.7±0.2"),
    ("2-2-4", "rem", False): (200, 24, 2.5, "58.3±0.5", "60.6±0.6"),
    ("2-2-4", "rem", True): (2000, 213, 2.5, "73.0±0.3", "74.4±0.4"),
    ("2-2-4", "mrem-s", True): (2000, 24, 4.6, "81.1±0.2", "81.5±0.2"),
}

# sec:num_module, fig:num_partition: GB by number of modules, BERT-base on MNLI; its accuracies are only drawn
MODULE_GIGABYTES = {1: 11.9, 2: 6.7, 3: 4.7, 4: 3.7, 6: 2.7}

# tab:pcq, BERT-base on MNLI: (bits, method) → without PCQ m, mm; with PCQ m, mm
PER_CHANNEL = {
    ("4-4-8", "rem"): ("73.3±0.3", "74.9±0.2", "75.9±0.3", "77.4±0.2"),
    ("4-4-8", "mrem-s"): ("83.5±0.1", "83.9±0.2", "83.6±0.1", "84.0±0.1"),
    ("2-2-8", "rem"): ("71.6±0.4", "73.4±0.4", "74.1±0.5", "75.6±0.5"),
    ("2-2-8", "mrem-s"): ("82.7±0.2", "82.7±0.2", "82.8±0.1", "82.9±0.1"),
    ("2-2-4", "rem"): ("58.3±0.5", "60.6±0.6", "59.3±0.4", "62.0±0.4"),
    ("2-2-4", "mrem-s"): ("81.1±0.2", "81.5±0.2", "81.1±0.2", "81.5±0.3"),
}
