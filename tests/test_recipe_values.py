"""Values of options: what they are parsed to, and which are refused, in YAML and in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recipes import FIELDS, flag, yaml_file

from mrem_deploy import recipe as config
from mrem_deploy.base.errors import UserError
from mrem_deploy.recipe import Recipe, from_yaml, make_recipe, parse_bits, parse_megabytes, parse_modules


def test_values_that_are_parsed() -> None:
    assert parse_bits("2-4-8") == (2, 4, 8)
    assert parse_bits("3-32-4") == (3, 32, 4)
    assert parse_modules("4") == 4
    assert parse_modules("3,6,9") == [3, 6, 9]
    assert parse_modules("[3, 6]") == [3, 6]
    assert parse_modules("3,") == [3]
    assert make_recipe({"modules": [3]}).modules == "3,"  # one cut point, not three modules
    assert make_recipe({"modules": 3}).modules == "3"
    assert [parse_megabytes(text) for text in ("8GB", "1.5 gb", "500M", "0MB")] == [8192, 1536, 500, 0]


# option, value as YAML gives it, what the message must say besides the option and the value
WRONG: list[tuple[str, Any, str]] = [
    *(("bits", value, "bits") for value in ("5-4-8", "4-3-8", "4-4-2", "4-4", "4-4-8-8", "a-b-c", "²-4-8")),
    ("bits", [4, 4, 8], "text"),
    *(("modules", value, "count or cut points") for value in ("0", "-1", "two", "", "3,x", "1.5")),
    *(("steps", value, "whole number") for value in ("many", 1.5, True, [5], float("inf"), float("nan"))),
    *((name, 0, "at least 1") for name in ("steps", "calib_size", "batch_size", "init_batches")),
    *((name, 0, "at least 1") for name in ("staleness", "worker_timeout")),
    *((name, -1, "0 or more") for name in ("seed", "checkpoint_steps", "threads", "eval_size")),
    *((name, -1, "0 or more") for name in ("workers", "max_restarts")),
    *(("teacher_forcing", value, "between 0 and 1") for value in (-0.1, 1.5, float("nan"))),
    ("max_length", 2, "at least 3"),
    *(("lr", value, "between 0 and 1") for value in (0, -1e-4, 1, float("nan"))),
    ("step_lr", 1.5, "between 0 and 1"),
    ("embedding_rate", 0, "above 0, at most 1"),
    ("embedding_rate", 1.5, "above 0, at most 1"),
    ("hot_rows", "some", "auto or a number"),
    ("lr", "fast", "a number"),
    ("method", "mrem-x", "mrem-s, mrem-p, rem, ptq, qat"),
    ("sensitivity", "guess", "error, hessian"),
    *(("qat_epochs", value, "such as 3+3") for value in ("6", "3+", "a+b", "-1+3", "0+0", "3+3+3", "nan+1")),
    *((name, 0, "at least 1") for name in ("qat_evals", "accumulate")),
    ("qat_lr", 1, "between 0 and 1"),
    ("train_size", -1, "0 or more"),
    *(("budget_mb", value, "MiB") for value in (-1, float("nan"), float("inf"))),
    *(("bits", value, "bits") for value in ("auto-", "auto-5", "auto-2-8", "auto8", "4-auto-8")),
    ("curvature", "hessian", "identity, adam"),
    ("weight_quantizer", "gptq", "twn, midrise, laq"),
    ("per_channel", "yes", "true or false"),
    ("per_channel", 1, "true or false"),
    ("keep_fp", 5, "pattern"),
    ("keep_fp", ["a", 5], "pattern"),
    ("text_column", True, "text"),
    ("model", ["a", "b"], "text"),
    ("data", {"train": "x"}, "text"),
    *(("max_memory", value, "8GB") for value in ("much", "8", "-1GB", "GB", "nanGB")),
    ("steps", None, "given"),
    *((name, 10**9 + 1, "at most 1000000000") for name in ("steps", "calib_size", "eval_size", "holdout")),
    ("threads", 1025, "at most 1024"),
    ("workers", 1025, "at most 1024"),
    ("seed", 2**32, "at most 4294967295"),
    ("max_memory", "1e400GB", "8GB"),
    *((name, "a\ud800", "UTF-8") for name in ("model", "data", "text_column", "keep_fp", "export")),
    ("model", "a\0b", "UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_a_wrong_value_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        make_recipe({name: value})
    assert said in str(caught.value)
    assert caught.value.remedy
    if "bits" not in name:
        assert flag(name) in caught.value.problem
        assert repr(value) in caught.value.problem


@pytest.mark.parametrize("quantizer", ["twn", "midrise"])
def test_quantizers_of_two_bits_need_them_somewhere(quantizer: str) -> None:
    for bits in ("2-2-8", "2-4-8", "4-2-8", "2-32-4", "8-2-32"):
        assert Recipe(weight_quantizer=quantizer, bits=bits).spec.weight_quantizer == quantizer
    assert Recipe(weight_quantizer=quantizer, bits="auto-4", budget_mb=12).chooses_bits
    for bits in ("4-4-8", "3-8-8", "32-32-8"):
        with pytest.raises(UserError, match=f"{quantizer} is for 2 bits, and --bits {bits} has none"):
            Recipe(weight_quantizer=quantizer, bits=bits)


@pytest.mark.parametrize("text", ["[]", "0", "false", "a text", "- a\n- b"])
def test_a_file_that_is_no_mapping(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="option: value"):
        from_yaml(yaml_file(tmp_path, text))


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert from_yaml(yaml_file(tmp_path, "# nothing yet\n")) == {}


def test_unknown_keys_are_named_and_the_known_listed(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        from_yaml(yaml_file(tmp_path, "bits: 4-4-8\nstep: 5\nlearning-rate: 1\n"))
    assert "learning_rate, step" in caught.value.problem
    assert all(name in caught.value.remedy for name in FIELDS)


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(UserError, match="cannot be read as YAML"):
        from_yaml(yaml_file(tmp_path, f"model: !!python/object/apply:pathlib.Path.touch [{marker}]"))
    assert not marker.exists()


def test_every_method_is_one_that_the_pipeline_has() -> None:
    assert config.METHODS == ("mrem-s", "mrem-p", "rem", "ptq", "qat")


def test_bits_to_be_chosen() -> None:
    recipe = Recipe(bits="auto", budget_mb=12)
    assert recipe.chooses_bits
    assert (recipe.spec.weight_bits, recipe.spec.embedding_bits, recipe.spec.activation_bits) == (32, 32, 8)
    assert Recipe(bits="auto-4", budget_mb=12).spec.activation_bits == 4
    assert not Recipe(bits="4-4-8").chooses_bits


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"bits": "auto"}, "needs a size"),
    ({"budget_mb": 12.0}, "no effect with --bits 4-4-8"),
    ({"bits": "4-4-8", "weight_quantizer": "twn"}, "twn is for 2 bits, and --bits 4-4-8 has none"),
    ({"train_size": 100}, "--train-size is for --method qat; the method is mrem-s"),
    ({"accumulate": 2, "method": "ptq"}, "--accumulate is for --method qat; the method is ptq"),
    ({"lr": 1e-3, "method": "qat"}, "--lr is for the other methods"),
    ({"method": "gobo"}, "lie on no grid"),
]


@pytest.mark.parametrize("rate", [5e-4, 5e-5])
def test_recipes_of_qat_from_earlier_builds_are_read(rate: float) -> None:
    """They name the rate that was the default of the other methods then."""
    assert make_recipe({"method": "qat", "lr": rate}).qat_lr == 1e-4


@pytest.mark.parametrize(("values", "said"), CONTRADICTIONS, ids=[said for _, said in CONTRADICTIONS])
def test_options_that_contradict_each_other(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        make_recipe(values)
    assert said in caught.value.problem
    assert caught.value.remedy


def test_a_recipe_made_in_python_gets_the_types_of_its_options(tmp_path: Path) -> None:
    recipe = Recipe(model=tmp_path, modules=3, steps="7", lr="1e-3", keep_fp=["a"])  # type: ignore[arg-type]
    assert (recipe.model, recipe.modules, recipe.steps, recipe.lr) == (str(tmp_path), "3", 7, 1e-3)
    assert recipe.keep_fp == ("a",)
    with pytest.raises(UserError, match=r"--steps must be a whole number; got 1\.5"):
        Recipe(steps=1.5)  # type: ignore[arg-type]


def test_an_alias_of_a_single_value_is_allowed(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "text_column: &name review\nlabel_column: *name\n")
    assert from_yaml(path) == {"text_column": "review", "label_column": "review"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keep_fp: &a [x]\ndata: *a\n", "single value"),
        ("keep_fp: &a [*a]\n", "single value"),
        ("steps: 1\nsteps: 1\n", "'steps' is given 2 times"),
        ("steps: " + "9" * 5000, "Exceeds the limit"),
        ("data: " + "{a: " * 2000 + "1" + "}" * 2000, "nested too deeply"),
        ("# " + "x" * 300_000, "262,144 bytes"),
        ("text_column: 2024-99-99", "month must be in"),
    ],
)
def test_yaml_that_nobody_can_use(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read as YAML") as caught:
        from_yaml(yaml_file(tmp_path, text))
    assert said in str(caught.value)


def test_a_hexadecimal_number_beyond_writing_is_refused(tmp_path: Path) -> None:
    for name in ("steps", "model", "modules"):
        with pytest.raises(UserError, match="bits"):
            make_recipe(from_yaml(yaml_file(tmp_path, f"{name}: 0x1{'0' * 5000}")))
    with pytest.raises(UserError, match="unknown options"):
        from_yaml(yaml_file(tmp_path, f"? 0x1{'0' * 5000}\n: 1"))
