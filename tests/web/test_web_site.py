"""`mrem web`: the folder it writes, what it refuses, how it gets its libraries. For the browser: web-test."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ir = pytest.importorskip("onnx_ir")

from exported import CLASSIFIER, frozen_model, skeleton  # noqa: E402
from npm_packages import WASM, packages  # noqa: E402
from tiny_bert import save_tiny_bert  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from mrem_deploy.base import cli  # noqa: E402
from mrem_deploy.base.errors import UserError  # noqa: E402
from mrem_deploy.export import transformers_js, write  # noqa: E402
from mrem_deploy.quant.frozen import FrozenModel  # noqa: E402
from mrem_deploy.quant.spec import QuantSpec  # noqa: E402
from mrem_deploy.recipe import Recipe  # noqa: E402
from mrem_deploy.result.recipe_file import write_recipe  # noqa: E402
from mrem_deploy.web import __main__, libraries, settings, site  # noqa: E402


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, no npm unless a test brings one, and one trace for all tests."""
    monkeypatch.setenv("MREM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(libraries.shutil, "which", lambda name: None)
    monkeypatch.setattr(write, "trace", lambda frozen: skeleton(frozen.config.model_type, frozen.head))


def save_result(folder: Path, head: str = CLASSIFIER, spec: QuantSpec | None = None) -> Path:
    source = save_tiny_bert(folder.with_name(f"{folder.name}-source"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    shutil.rmtree(source)
    return frozen_model("bert", head, spec).save(folder, tokenizer)


@pytest.fixture
def result(tmp_path: Path) -> Path:
    return save_result(tmp_path / "result")


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., tuple[int, Path]]:
    """Run the command with libraries at hand."""

    def run(folder: Path, *more: str) -> tuple[int, Path]:
        if not (tmp_path / "npm").exists():
            packages(tmp_path / "npm")
        out = tmp_path / "site"
        argv = [str(folder), "--out", str(out), "--libraries", str(tmp_path / "npm"), *more]
        return cli.run(__main__.main, argv), out

    return run


def test_the_folder(result: Path, build: Any, capsys: Any) -> None:
    code, out = build(result, "--title", "<b>Mine</b>")
    assert code == 0
    told = capsys.readouterr().out
    assert f"python -m http.server --directory {out}" in told
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    page = {path.name for path in site.PAGE.iterdir()}
    vendored = {f"vendor/{name}" for name in libraries.WANTED}
    model = {"config.json", "mrem-web.json", "onnx/model_q4.onnx", "tokenizer.json", "tokenizer_config.json"}
    assert files == page | vendored | {f"model/{name}" for name in model} | {"site.json"}
    for path in site.PAGE.iterdir():  # nothing of the model is written into the page itself
        assert (out / path.name).read_bytes() == path.read_bytes()
    content = json.loads((out / "site.json").read_text())
    assert content["title"] == "<b>Mine</b>"
    assert content["labels"] == settings.labels_of(FrozenModel.read(result))
    assert content["file"] == "model/onnx/model_q4.onnx"
    assert content["file_bytes"] == (out / content["file"]).stat().st_size
    assert content["runtime_bytes"] == (out / "vendor" / libraries.RUNTIME).stat().st_size
    assert content["result_digest"] == FrozenModel.read(result).digest
    longest = min(128, FrozenModel.read(result).config.max_position_embeddings - 2)
    assert (content["kind"], content["pair"], content["max_length"]) == ("single-label", False, longest)
    assert gzip.decompress((out / "vendor" / libraries.RUNTIME).read_bytes()) == WASM
    ort.InferenceSession(out / content["file"])


def test_a_page_is_replaced_and_the_cache_used(result: Path, build: Any, tmp_path: Path) -> None:
    assert build(result)[0] == 0
    (tmp_path / "site" / "left.txt").write_text("from an earlier version")
    assert cli.run(__main__.main, [str(result), "--out", str(tmp_path / "site")]) == 0, "without npm"
    assert not (tmp_path / "site" / "left.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "npm", "result", "site"]


def test_an_embedder(tmp_path: Path, build: Any) -> None:
    folder = save_result(tmp_path / "result", "feature-extraction", QuantSpec(2, 2, 8))
    texts = tmp_path / "texts.txt"
    texts.write_text("one\n\n two \n", encoding="utf-8")
    code, out = build(folder, "--texts", str(texts))
    assert code == 0
    content = json.loads((out / "site.json").read_text())
    assert (content["kind"], content["pooling"]) == ("embedding", "mean")
    assert (content["sentences"], content["examples"], content["labels"]) == (["one", "two"], [], [])
    assert content["file"] == "model/onnx/model_q2.onnx"
    assert content["prompts"] == {"query": "", "document": ""}


def _tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _damage(folder: Path) -> None:
    path = folder / "mrem.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def _texts(content: bytes) -> Callable[[Path], None]:
    return lambda folder: folder.with_name("texts.txt").write_bytes(content) and None


def _other_version(folder: Path) -> None:
    path = packages(folder.with_name("npm")) / "node_modules" / libraries.ORT / "package.json"
    path.write_text('{"version": "1.0.0"}')


def _lacking(folder: Path) -> None:
    (packages(folder.with_name("npm")) / "node_modules" / libraries.TOKENIZERS / "LICENSE").unlink()


def _foreign(folder: Path) -> None:
    folder.with_name("site").mkdir()
    (folder.with_name("site") / "index.html").write_text("years of work")


MISTAKES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...], tuple[str, ...]]] = {
    "not ours": (lambda folder: (folder / "mrem.json").unlink(), (), ("is not a quantized model",)),
    "no folder": (shutil.rmtree, (), ("result",)),
    "damaged": (_damage, (), ("cannot be read",)),
    "no fast tokenizer": (_tokenizer, (), ("tokenizer.json",)),
    "somebody else's folder": (_foreign, (), ("were not written by this command",)),
    "texts missing": (lambda folder: None, ("--texts", "no-where.txt"), ("no-where.txt", "no such file")),
    "texts empty": (_texts(b"\n \n"), ("--texts", "texts.txt"), ("0 sentences", "one sentence in each line")),
    "texts no text": (_texts(b"\xff\xfe"), ("--texts", "texts.txt"), ("not UTF-8",)),
    "texts of pairs": (_texts(b"a\tb\n"), ("--texts", "texts.txt"), ("sentence 1 has 2 parts, 1 expected",)),
    "too many texts": (_texts(b"a\n" * 1001), ("--texts", "texts.txt"), ("1001 sentences", "1 to 1000")),
    "other libraries": (_other_version, (), (libraries.ORT, "'1.0.0'", "npm ci")),
    "libraries incomplete": (_lacking, (), ("has no LICENSE", "npm ci")),
    "no libraries there": (lambda folder: folder.with_name("npm").mkdir(), (), ("package.json", "npm ci")),
}


@pytest.mark.parametrize(("damage", "more", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_users_mistake_leaves_nothing(
    damage: Callable[[Path], Any],
    more: tuple[str, ...],
    says: tuple[str, ...],
    result: Path,
    build: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    damage(result)
    if not (tmp_path / "npm").exists():
        packages(tmp_path / "npm")
    before = sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts)
    code, _ = build(result, *more)
    assert code == cli.EXIT_USER_ERROR
    told = capsys.readouterr().err
    assert all(part in told for part in ("error:", *says)), told
    after = sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts)
    assert after == before


@pytest.mark.parametrize("change", [lambda text: text.replace("32", "16"), lambda text: text + "\0"])
def test_a_recipe_that_has_changed_is_named(
    result: Path, build: Any, capsys: Any, change: Callable[[str], str]
) -> None:
    write_recipe(result / "recipe.yaml", Recipe(model="m", task="sst2", data="d", max_length=32))
    code, out = build(result)
    assert code == 0
    assert json.loads((out / "site.json").read_text())["max_length"] == 32
    assert "recipe" not in capsys.readouterr().err
    (result / "recipe.yaml").write_text(change((result / "recipe.yaml").read_text()))
    assert build(result)[0] == 0
    assert "recipe.yaml" in (told := capsys.readouterr().err)
    assert "changed since it was written" in told


def test_a_model_that_the_page_has_no_form_for(tmp_path: Path, build: Any, capsys: Any) -> None:
    code, out = build(save_result(tmp_path / "result", "question-answering"))
    assert code == cli.EXIT_USER_ERROR
    assert "--profile web" in capsys.readouterr().err, "what to do instead"
    assert not out.exists()


def test_a_full_disk_leaves_the_old_page(
    result: Path, build: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    _, out = build(result)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers_js, "write_json", full)
    assert build(result)[0] == cli.EXIT_USER_ERROR
    assert "no space left" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert not list(out.parent.glob(".site*"))


# -- npm ---------------------------------------------------------------------------------------------------


def fake_npm(place: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """An npm that writes down how it was called, and then does as `script` says."""
    path = place / "fake-npm"
    log = place / "calls.txt"
    begin = f"#!{sys.executable}\nimport os, shutil, sys\n"
    begin += f"open({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    path.write_text(begin + script)
    path.chmod(0o755)
    monkeypatch.setattr(libraries.shutil, "which", lambda name: str(path) if name == "npm" else None)
    return log


def test_npm_is_called_once_and_runs_no_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = packages(tmp_path / "source")
    script = (
        "assert sorted(os.listdir('.')) == ['package-lock.json', 'package.json']\n"
        f"shutil.copytree({str(source / 'node_modules')!r}, 'node_modules')\n"
    )
    log = fake_npm(tmp_path, monkeypatch, script)
    found = libraries.libraries(None)
    assert sorted(path.name for path in found.iterdir()) == sorted(libraries.WANTED)
    assert libraries.libraries(None) == found
    (call,) = log.read_text().splitlines()
    assert call.startswith("ci ")
    assert "--ignore-scripts" in call
    assert [path.name for path in found.parent.iterdir()] == [found.name], "nothing else is kept"


def test_what_npm_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(tmp_path, monkeypatch, "sys.exit('npm error code EINTEGRITY\\nnpm error sha512 differs\\nmore')")
    with pytest.raises(UserError, match="EINTEGRITY; sha512 differs") as caught:
        libraries.libraries(None)
    assert "--libraries" in caught.value.remedy
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


def test_without_npm(result: Path, tmp_path: Path, capsys: Any) -> None:
    assert cli.run(__main__.main, [str(result), "--out", str(tmp_path / "site")]) == cli.EXIT_USER_ERROR
    told = capsys.readouterr().err
    assert "npm" in told
    assert "install Node.js" in told
    assert not (tmp_path / "site").exists()


def test_versions_are_pinned_with_digests_and_without_addresses() -> None:
    text = (libraries.PINS / libraries.LOCK).read_text(encoding="utf-8")
    entries = json.loads(text)["packages"]
    assert entries.pop("")["dependencies"] == libraries.versions()
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in libraries.versions().values())
    assert all(entry["integrity"].startswith("sha512-") for entry in entries.values())
    for name, version in libraries.versions().items():
        assert entries[f"node_modules/{name}"]["version"] == version
    assert "http" not in text
    assert "resolved" not in text


# -- the page ----------------------------------------------------------------------------------------------


def test_the_page_names_no_other_host_and_makes_no_html_from_text() -> None:
    for path in site.PAGE.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"(^|\s)//\s.*", "", text, flags=re.M), path.name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert word not in text, path.name


def test_the_policy_of_the_page() -> None:
    page = (site.PAGE / "index.html").read_text(encoding="utf-8")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("default-src") == "'none'"
    assert rules.pop("script-src") == "'self' 'wasm-unsafe-eval'"
    assert {rules.pop(name) for name in ("connect-src", "style-src", "img-src")} == {"'self'"}
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert set(rules.values()) == {"'none'"}
    assert not re.findall(r"<script(?! type=\"module\" src=)|\son\w+=|\sstyle=", page)


@pytest.mark.parametrize(
    ("changes", "kind", "labels"),
    [
        ({}, "single-label", ["LABEL_0", "LABEL_1"]),
        ({"num_labels": 1}, "score", ["LABEL_0"]),
        ({"problem_type": "multi_label_classification"}, "multi-label", ["LABEL_0", "LABEL_1"]),
        ({"id2label": {1: "no", 0: "yes"}}, "single-label", ["yes", "no"]),
    ],
)
def test_kinds_of_classifiers(changes: dict[str, Any], kind: str, labels: list[str]) -> None:
    from transformers import BertConfig

    frozen = FrozenModel(BertConfig(**changes), CLASSIFIER)
    assert settings.kind_of(frozen) == kind
    assert settings.labels_of(frozen) == labels
