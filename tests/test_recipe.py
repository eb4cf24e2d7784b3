"""Every option, in YAML and on the command line; what is refused; and the recipe that is written back."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from recipes import FIELDS, flag, yaml_file

from mrem_deploy import demo, pipeline, preflight, quantize
from mrem_deploy.base import cli
from mrem_deploy.recipe import Recipe, from_yaml, make_recipe
from mrem_deploy.recipe_page import page
from mrem_deploy.result import Metrics, Result

# option -> as written in YAML, as given on the command line, what both must come to; never the default
OPTIONS: dict[str, tuple[str, list[str], Any]] = {
    "model": ("org/some-bert", ["org/some-bert"], "org/some-bert"),
    "task": ("sst2", ["sst2"], "sst2"),
    "data": ("nyu-mll/glue", ["nyu-mll/glue"], "nyu-mll/glue"),
    "out": ("/results/a", ["/results/a"], "/results/a"),
    "bits": ("2-2-4", ["2-2-4"], "2-2-4"),
    "budget_mb": ("12.5", ["12.5"], 12.5),
    "target_drop": ("1.5", ["1.5"], 1.5),
    "sensitivity": ("hessian", ["hessian"], "hessian"),
    "method": ("rem", ["rem"], "rem"),
    "preset": ("quick", ["quick"], "quick"),
    "time_budget": ("10m", ["10m"], "10m"),
    "modules": ("[3, 6]", ["3,6"], "3,6"),
    "steps": ("500", ["500"], 500),
    "calib_size": ("64", ["64"], 64),
    "batch_size": ("24", ["24"], 24),
    "max_length": ("64", ["64"], 64),
    "lr": ("1e-5", ["1e-5"], 1e-5),  # PyYAML reads 1e-5, without a point, as text
    "step_lr": ("0.01", [".01"], 0.01),
    "embedding_rate": ("0.25", [".25"], 0.25),
    "seed": ("7", ["7"], 7),
    "per_channel": ("false", [], False),
    "symmetric": ("yes", [], True),
    "keep_fp": ("['*.pooler.*', '*.0.*']", ["*.pooler.*", "--keep-fp", "*.0.*"], ("*.pooler.*", "*.0.*")),
    "weight_quantizer": ("uniform", ["uniform"], "uniform"),
    "hot_rows": ("32", ["32"], "32"),
    "curvature": ("adam", ["adam"], "adam"),
    "centring": ("always", ["always"], "always"),
    "text_column": ("review", ["review"], "review"),
    "text_pair_column": ("'yes'", ["yes"], "yes"),
    "label_column": ("3", ["3"], "3"),
    "eval_data": ("elsewhere/dev", ["elsewhere/dev"], "elsewhere/dev"),
    "eval_size": ("100", ["100"], 100),
    "threshold": ("0.5", ["0.5"], 0.5),
    "staleness": ("4", ["4"], 4),
    "teacher_forcing": ("0", ["0"], 0.0),
    "deterministic": ("true", [], True),
    "workers": ("2", ["2"], 2),
    "max_restarts": ("0", ["0"], 0),
    "worker_timeout": ("30", ["30"], 30),
    "train_size": ("2000", ["2000"], 2000),
    "qat_epochs": ("1+0.5", ["1+0.5"], "1+0.5"),
    "qat_lr": ("2e-5", ["2e-5"], 2e-5),
    "qat_warmup": ("0", ["0"], 0.0),
    "qat_relative": ("false", [], False),
    "qat_evals": ("4", ["4"], 4),
    "accumulate": ("2", ["2"], 2),
    "holdout": ("100", ["100"], 100),
    "output_loss": ("kl", ["kl"], "kl"),
    "teacher_cache": ("never", ["never"], "never"),
    "init_batches": ("2", ["2"], 2),
    "checkpoint_steps": ("0", ["0"], 0),
    "cache_dir": ("/scratch", ["/scratch"], "/scratch"),
    "max_memory": ("8GB", ["8GB"], "8GB"),
    "export": ("qdq,int8", ["qdq,int8"], "qdq,int8"),
    "validate": ("false", [], False),
    "scored_by": ("torch", ["torch"], "torch"),
    "threads": ("2", ["2"], 2),
    "device": ("cpu", ["cpu"], "cpu"),
    "kernels": ("reference", ["reference"], "reference"),
}
# What an option needs beside it; alone it would contradict the rest.
BESIDE = {
    "budget_mb": ["--bits", "auto"],
    "target_drop": ["--bits", "auto"],
    "train_size": ["--method", "qat"],
    "accumulate": ["--method", "qat"],
}
NEEDED = ["--model", "m", "--task", "t", "--data", "d", "--out", "/o"]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`captured(argv)`: the recipe that the command line would run."""
    recipes: list[Recipe] = []

    def run(argv: list[str]) -> Recipe:
        assert cli.run(quantize.main, argv) == 0
        return recipes.pop()

    def keep(recipe: Recipe, *_: bool) -> Result:
        recipes.append(preflight.absolute_paths(recipe))  # as `pipeline.run` does first
        return Result("nowhere", Metrics())

    monkeypatch.setattr(pipeline, "run", keep)
    return run


def test_the_table_above_has_every_option() -> None:
    assert list(OPTIONS) == FIELDS


@pytest.mark.parametrize("name", FIELDS)
def test_an_option_in_yaml_and_on_the_command_line(name: str, tmp_path: Path, captured: Any) -> None:
    text, arguments, value = OPTIONS[name]
    default = getattr(Recipe(), name)
    assert value != default, "a sample that is the default proves nothing"
    needed = [*NEEDED, *BESIDE.get(name, [])]
    by_yaml = captured([*needed, "--config", str(yaml_file(tmp_path, f"{name}: {text}"))])
    given = f"--no-{flag(name)[2:]}" if value is False else flag(name)
    by_flag = captured([*needed, given, *arguments])
    if flag(name) in NEEDED:  # given on the command line as well, which wins over the file
        by_yaml = make_recipe(from_yaml(yaml_file(tmp_path, f"{name}: {text}")))
    for recipe in (by_yaml, by_flag):
        assert getattr(recipe, name) == value
        assert type(getattr(recipe, name)) is type(value)
    dashed = from_yaml(yaml_file(tmp_path, f"{name.replace('_', '-')}: {text}"))
    beside = {BESIDE[name][0][2:]: BESIDE[name][1]} if name in BESIDE else {}
    assert getattr(make_recipe(dashed | beside), name) == value


@pytest.mark.parametrize("name", ["per_channel", "symmetric"])
def test_a_switch_can_be_turned_off_again(name: str, tmp_path: Path, captured: Any) -> None:
    path = yaml_file(tmp_path, f"{name}: true")
    assert getattr(captured([*NEEDED, "--config", str(path)]), name) is True
    assert getattr(captured([*NEEDED, "--config", str(path), f"--no-{flag(name)[2:]}"]), name) is False


def test_the_command_line_wins_over_the_file(tmp_path: Path, captured: Any) -> None:
    path = yaml_file(tmp_path, "bits: 2-2-8\nsteps: 500\nkeep_fp: [a]\n")
    recipe = captured([*NEEDED, "--config", str(path), "--steps", "9", "--keep-fp", "b"])
    assert (recipe.bits, recipe.steps, recipe.keep_fp) == ("2-2-8", 9, ("b",))


def test_the_defaults() -> None:
    recipe = Recipe()
    assert (recipe.bits, recipe.method, recipe.modules) == ("4-4-8", "mrem-s", "4")
    assert (recipe.steps, recipe.calib_size, recipe.batch_size, recipe.max_length) == (400, 4096, 16, 128)
    assert recipe.spec.weight_bits == recipe.spec.embedding_bits == 4
    assert recipe.spec.activation_bits == 8


def test_the_help_names_every_option_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        quantize.main(["--help"])
    assert caught.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert [name for name in FIELDS if f"{flag(name)} " not in told and f"{flag(name)}," not in told] == []
    assert "(default 4-4-8)" in told
    assert "mrem-s|mrem-p|rem|ptq" in told
    assert all(task in told for task in ("feature-extraction", "token-classification", "question-answering"))


def test_the_help_is_in_groups_with_rare_options_last(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quantize.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    titles = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    groups = ["model and data", "bits", "training", "mrem-p", "qat", "output", "machine"]
    assert titles == ["options", *groups, "examples"]
    assert {field.metadata["group"] for field in dataclasses.fields(Recipe)} == set(groups)
    listed = [line.split()[0].rstrip(",") for line in lines if line.startswith("  --")]
    assert listed.index("--device") < listed.index("--cache-dir")  # the other way round in recipe.yaml


@pytest.mark.parametrize("task", ["sst2", "squad", "squad_v2"])
def test_the_help_shows_the_defaults_of_the_tasks(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quantize.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    of_squad = re.search(r"--max-length .*?; squad and squad_v2 (\S+)\)", told)
    usual = re.search(r"--max-length .*?\(default (\S+);", told)
    assert of_squad is not None
    assert usual is not None
    assert (of_squad if task.startswith("squad") else usual)[1] == str(Recipe(task=task).max_length)


@pytest.mark.parametrize(
    ("bits", "rate"), [("2-2-8", 1e-3), ("4-4-8", 1e-4), ("8-8-8", 1e-4), ("2-4-4", 1e-3)]
)
def test_the_rate_follows_from_the_bits(bits: str, rate: float) -> None:
    assert Recipe(bits=bits).lr == rate
    assert Recipe(bits=bits, lr=5e-4).lr == 5e-4
    assert 1e-4 < Recipe(bits="auto", budget_mb=9).lr < 1e-3


def test_the_page_of_the_options_is_up_to_date() -> None:
    path = Path(__file__).resolve().parent.parent / "docs" / "recipe.md"
    assert path.read_text(encoding="utf-8") == page(), "run `make docs`"
    assert [name for name in FIELDS if f"| `{flag(name)}` |" not in page()] == []


def test_no_arguments_run_the_built_in_example(monkeypatch: pytest.MonkeyPatch, captured: Any) -> None:
    options = {"model": "starter", "task": "text-classification", "data": "reviews", "out": "/o", "steps": 3}
    monkeypatch.setattr(demo, "demo_options", lambda: dict(options))
    assert [(run["bits"], run["out"]) for run in demo.demo_runs({"bits": "8-8-8"})] == [("8-8-8", "/o")]
    runs = demo.demo_runs({})
    assert [{name: run[name] for name in options} for run in runs] == [options, options | {"out": "/o-2bit"}]
    assert [run.get("bits") for run in runs] == [None, "2-2-8"]
    last = captured([])
    assert {name: getattr(last, name) for name in options} == options | {"out": "/o-2bit"}
    changed = captured(["--bits", "2-2-8", "--steps", "5", "--out", "/other"])
    assert (changed.model, changed.bits, changed.steps, changed.out) == ("starter", "2-2-8", 5, "/other")


# --- what is written back ----------------------------------------------------------------------


def test_the_written_recipe_reads_as_the_same_recipe(tmp_path: Path) -> None:
    # All others at once allow these only.
    agreeing = {"bits": "auto-4", "method": "qat", "lr": 3e-4, "time_budget": None, "target_drop": None}
    full = Recipe(**{name: value for name, (_, _, value) in OPTIONS.items()} | agreeing)
    assert make_recipe(from_yaml(yaml_file(tmp_path, full.to_yaml()))) == full
    assert make_recipe(from_yaml(yaml_file(tmp_path, Recipe().to_yaml()))) == Recipe()


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "null",
        "~",
        "12",
        "1e3",
        "2024-01-01",
        "a: b",
        "# c",
        "ü\t“",
        "",
        " ",
        "a\x85b",
        "a\u2028b",
        "a\u2029",
    ],
)
def test_texts_that_yaml_would_read_as_something_else(text: str, tmp_path: Path) -> None:
    recipe = Recipe(model=text, text_column=text, keep_fp=(text,))
    assert make_recipe(from_yaml(yaml_file(tmp_path, recipe.to_yaml()))) == recipe


@pytest.mark.parametrize("name", FIELDS)
def test_the_digest_follows_what_decides_the_result(name: str) -> None:
    beside = {BESIDE[name][0][2:]: BESIDE[name][1]} if name in BESIDE else {}
    size = {"target_drop": 0.5} if name == "target_drop" else {"budget_mb": 1.0}
    plain = Recipe() if "bits" not in beside else Recipe(**beside, **size)
    changed = dataclasses.replace(plain, **beside | {name: OPTIONS[name][2]})
    same = changed.digest() == dataclasses.replace(plain, **beside).digest()
    of_no_weight = ("out", "preset", "cache_dir", "max_memory", "checkpoint_steps", "export", "validate")
    of_no_weight += ("threshold", "scored_by", "workers", "max_restarts", "worker_timeout")
    assert same == (name in of_no_weight)


def test_the_digest_of_a_recipe_stays() -> None:
    """Checkpoints of interrupted runs are found by it, also by a later version.

    A later version has more options: with the values that stand for what was done before, the digest is
    that of then.
    """
    young = {item.name: item.metadata["before"] for item in dataclasses.fields(Recipe)}
    before = {name: value for name, value in young.items() if value is not dataclasses.MISSING}
    before |= {"batch_size": 32, "calib_size": 4096, "per_channel": False}  # defaults that were others
    plain = Recipe(model="m", task="sst2", data="d", out="o", steps=2000, lr=5e-4, **before)
    assert plain.digest() == "250bc9f395263924"
    squad = {"task": "squad", "bits": "2-2-8", "method": "mrem-p", "keep_fp": ("a*",)}
    other = Recipe(model="m", data="d", out="o", steps=4000, lr=5e-5, **squad, **before)
    assert other.digest() == "2ffb038fb66d34fa"
    assert plain.digest() != Recipe(model="m", task="sst2", data="d", out="o").digest()


def test_a_recipe_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().steps = 1  # type: ignore[misc]


def test_paths_work_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "bert").mkdir()
    (tmp_path / "home" / "glue").mkdir(parents=True)
    path = yaml_file(tmp_path, "model: bert\ntask: sst2\ndata: ~/glue\nout: ~/result\ncache_dir: scratch\n")
    recipe = captured(["--config", str(path)])
    assert recipe.model == str(tmp_path / "bert")
    assert recipe.data == str(tmp_path / "home" / "glue")
    assert recipe.out == str(tmp_path / "home" / "result")
    assert recipe.cache_dir == str(tmp_path / "scratch")
    assert captured([*NEEDED, "--model", "org/bert"]).model == "org/bert"  # no such folder: a hub id
