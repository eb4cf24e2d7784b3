"""`make web-test`: the page of `mrem web` in headless Chromium, offline, against Python's own numbers.

    python tests/helpers/web_site.py [RESULT …] [--texts FILE] [--screenshots DIR]

Without results it makes tiny ones: a classifier with a hostile title and hostile labels, one for pairs and an
embedder. Every site is served as `python -m http.server` does it, on loopback, and driven by
tests/web/browser.mjs through Playwright. Needs npm and a Chromium ($CHROMIUM, or one on the PATH). Load time
and latency are printed and kept in build/web-test/report.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from tiny_job import job_in, save_model, sentences, workshop_in, write_jsonl
from transformers import AutoTokenizer

from mrem_deploy.base import cli
from mrem_deploy.base.errors import UserError
from mrem_deploy.base.machine import describe_machine
from mrem_deploy.kernels import pack
from mrem_deploy.models.sentence_files import sentence_files
from mrem_deploy.web.site import build_site

HERE = Path(__file__).resolve().parents[1] / "web"
BUILD = Path("build/web-test").resolve()
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOSTILE = '<b onclick=alert(1)>Reviews</b> &amp; "more"'
HOSTILE_LABELS = {0: "<img src=x onerror=alert(1)>", 1: "</span><script>alert(2)</script>"}
# Integers are the same (tested apart). Exp, erf and float sums round differently in WebAssembly, which moves
# an activation near a boundary to the next code now and then, and more layers amplify it. On 300 sentences of
# SST-2, onnxruntime and torch differed in the same way: by up to 0.18, by 0.003 in the mean; the browser and
# onnxruntime by up to 0.25, by 0.0025 in the mean. A wrong operator or token shifts all outputs by about 1.
TOLERANCE = {"largest": 0.5, "mean": 0.01}
SENTENCES = [
    "A warm, funny film that never loses its way.",
    "The plot makes no sense and the jokes fall flat.",
    "It is what you would expect, no more and no less.",
    "good",
    "Not bad at all!",
    "I would rather watch paint dry than sit through this again.",
    "The actors do what they can, but the script gives them nothing to work with and the ending is a mess.",
    "Déjà vu: naïve, über-slick and 100% forgettable …",
    "Three hours, two naps, one idea.",
    "unbelievably tender and quietly devastating",
    "The best thing about it is the poster; the second best is that it ends.",
    "A triumph.",
]
WORDS_OF = {16: 12, 32: 28, 64: 60, 128: 140}  # about how many words make so many tokens


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULT")
    parser.add_argument("--texts", type=Path, help="more sentences to compare, one in each line")
    parser.add_argument("--screenshots", type=Path, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=30, help="timed runs of each length")
    options = parser.parse_args(argv)
    tools()
    BUILD.mkdir(parents=True, exist_ok=True)
    packages = _packages()
    made = options.results or _tiny_results(BUILD / "tiny")
    more = options.texts.read_text(encoding="utf-8").splitlines() if options.texts else []
    if options.screenshots:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    sites = [_site(folder, more, tiny=not options.results) for folder in made]
    with _served([BUILD / "sites" / site["name"] for site in sites]) as addresses, _served([BUILD]) as other:
        for site, address in zip(sites, addresses, strict=True):
            site["url"] = f"{address}/"
        job = {
            "chromium": tools()[1],
            "packages": str(packages),
            "sites": sites,
            "elsewhere": other[0],
            "exact": _exact_products(BUILD / "exact.onnx"),
            "screenshots": str(options.screenshots.resolve()) if options.screenshots else None,
            "report": str(BUILD / "report.json"),
            "rounds": options.rounds,
        }
        (BUILD / "job.json").write_text(json.dumps(job), encoding="utf-8")
        done = subprocess.run([tools()[0], str(HERE / "browser.mjs"), str(BUILD / "job.json")])
    if done.returncode == 0:
        report = json.loads((BUILD / "report.json").read_text())
        print(f"{report['browser']} on {describe_machine()['cpu']}")
        print(json.dumps(report["sites"], indent=2))
    return int(done.returncode != 0)


def tools() -> tuple[str, str]:
    """node and the browser; a UserError that says what to install."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise UserError(
            "make web-test needs Node.js with npm", "install them (Debian: apt install nodejs npm)"
        )
    named = os.environ.get("CHROMIUM")
    browser = next(filter(None, [named, *map(shutil.which, BROWSERS)]), None)
    if browser is None:
        raise UserError(
            "make web-test needs Chromium",
            "install it (Debian: apt install chromium), or name it: CHROMIUM=/path",
        )
    return node, browser


def _packages() -> Path:
    """Playwright, axe and transformers.js at the versions of tests/web/package.json."""
    folder = BUILD / "npm"
    wanted = {name: (HERE / name).read_bytes() for name in ("package.json", "package-lock.json")}
    if all(
        (folder / name).is_file() and (folder / name).read_bytes() == data for name, data in wanted.items()
    ):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_bytes(wanted["package.json"])
    (folder / "package-lock.json").write_bytes(wanted["package-lock.json"])
    command = [
        str(shutil.which("npm")),
        "ci",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--loglevel=error",
    ]
    if subprocess.run(command, cwd=folder).returncode != 0:
        shutil.rmtree(folder)
        raise UserError("npm could not fetch what the test needs", "check the network and npm's settings")
    return folder


def _tiny_results(root: Path) -> list[Path]:
    """A classifier with hostile names, one for pairs, an embedder."""
    shutil.rmtree(root, ignore_errors=True)
    with workshop_in(root):
        config = json.loads((root / "model" / "config.json").read_text())
        config |= {"id2label": HOSTILE_LABELS, "label2id": {name: i for i, name in HOSTILE_LABELS.items()}}
        (root / "model" / "config.json").write_text(json.dumps(config))
        rows = sentences(80, seed=1)
        pairs = [row | {"other": rows[-1 - i]["text"]} for i, row in enumerate(rows)]
        write_jsonl(root / "pair-data" / "train.jsonl", pairs[:60])
        write_jsonl(root / "pair-data" / "dev.jsonl", pairs[60:])
        save_model(root / "encoder", "BertModel")
        quick = {"method": "ptq", "export": "none", "threads": 1}
        jobs = {
            "classifier": {"bits": "4-4-8", **quick},
            "pairs": {"bits": "2-2-8", "data": root / "pair-data", "text_pair_column": "other", **quick},
            "embedder": {"bits": "8-8-8", "model": root / "encoder", "task": "feature-extraction", **quick},
        }
        for name, given in jobs.items():
            if job_in(root, name, **given).run("--no-validate") != 0:
                raise SystemExit(f"error: the tiny {name} could not be quantized")
    return [root / name for name in jobs]


def _site(folder: Path, more: list[str], tiny: bool) -> dict[str, Any]:
    """Build the page of a result, and say what Python gets from the file that is in it."""
    out = BUILD / "sites" / folder.name
    site = build_site(folder, out, title=HOSTILE if tiny else None)
    told = json.loads((out / "site.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    session = onnxruntime.InferenceSession(site.file, providers=["CPUExecutionProvider"])
    longest = told["max_length"]

    def answer(texts: list[str]) -> dict[str, Any]:
        tokens = tokenizer(*texts, truncation=True, max_length=longest, return_tensors="np")
        given = {entry.name: tokens[entry.name].astype(np.int64) for entry in session.get_inputs()}
        (values,) = session.run(None, given)
        if told["kind"] == "embedding":
            pooled = sentence_files(folder).head(values, given["attention_mask"])
            values = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        numbers = [float(value) for value in values[0]]
        named = tokenizer.convert_ids_to_tokens(tokens["input_ids"][0].tolist())
        return {"texts": texts, "tokens": named, "values": numbers, "label": int(np.argmax(numbers))}

    rows = [row["text"] for row in sentences(20, seed=4)]
    asked = [*(rows if tiny else SENTENCES), *more]
    asked = [[text, asked[-1 - i]] if told["pair"] else [text] for i, text in enumerate(asked)]
    words = [*" ".join(SENTENCES if not tiny else rows).split()]
    timed = [" ".join((words * 9)[:count]) for tokens, count in WORDS_OF.items() if tokens <= longest]
    found: dict[str, Any] = {
        **{key: told[key] for key in ("title", "kind", "pair", "labels", "file")},
        "name": folder.name,
        "longest": longest,
        "about": {"bits": told["bits"], "file": told["file"], "MiB": round(site.file_bytes / 2**20, 2),
                  "MiB_with_everything": round(site.bytes / 2**20, 2)},
        "tolerance": {**TOLERANCE, "labels": len(asked) // 200},
        "expected": [answer(texts) for texts in asked],
        "long": answer([" ".join(words * 100)]) if not told["pair"] else None,
        "timed": [[text, *([text] if told["pair"] else [])] for text in timed],
    }  # fmt: skip
    if told["kind"] == "embedding":
        query = np.array(answer([rows[0]])["values"])
        scores = [(text, float(query @ np.array(answer([text])["values"]))) for text in told["sentences"]]
        found["search"] = {"query": rows[0], "ranked": sorted(scores, key=lambda pair: -pair[1])}
    return found


def _exact_products(path: Path) -> dict[str, Any]:
    """Integer matrices over their whole range, in the forms of the profile: the sums must be exact."""
    draw, width, most = np.random.default_rng(0), 64, 4
    codes = draw.choice([0, 1, 127, 128, 254, 255], size=(most, width)).astype(np.uint8)
    codes[0], codes[1] = 255, 0
    nodes, constants, outputs, expected = [], [], [], {}
    scale = numpy_helper.from_array(np.float32(1), "one")
    middle = numpy_helper.from_array(np.uint8(128), "middle")
    for name, bits, low, high in (("w2", 2, -2, 1), ("w4", 4, -7, 7), ("w8", 8, 0, 255)):
        weight = draw.choice([low, high, draw.integers(low, high + 1)], size=(width, 16))
        zero = 128 if bits == 8 else 0
        if bits == 8:
            constants.append(numpy_helper.from_array(weight.astype(np.uint8), f"{name}.int8"))
        else:
            kind = {2: TensorProto.INT2, 4: TensorProto.INT4}[bits]
            raw = pack(np.ascontiguousarray(weight, np.int8), bits).tobytes()
            constants.append(helper.make_tensor(name, kind, weight.shape, raw, raw=True))
            nodes.append(helper.make_node("Cast", [name], [f"{name}.int8"], to=TensorProto.INT8))
        given = ["a", f"{name}.int8", "one", "one", "middle", "middle" if zero else ""]
        nodes.append(helper.make_node("MatMulIntegerToFloat", given, [f"{name}.y"], domain="com.microsoft"))
        outputs.append(helper.make_tensor_value_info(f"{name}.y", TensorProto.FLOAT, [most, 16]))
        product = (codes.astype(np.int64) - 128) @ (weight.astype(np.int64) - zero)
        expected[f"{name}.y"] = [int(value) for value in product.ravel()]
    a = helper.make_tensor_value_info("a", TensorProto.UINT8, [most, width])
    graph = helper.make_graph(nodes, "exact", [a], outputs, [scale, middle, *constants])
    opsets = [helper.make_opsetid("", 25), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=13), path)
    return {"model": str(path), "a": codes.ravel().tolist(), "shape": [most, width], "outputs": expected}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with suppress(ConnectionError):  # a page that is closed takes no more
            super().copyfile(source, outputfile)


@contextmanager
def _served(folders: list[Path]) -> Iterator[list[str]]:
    """Each folder on a port of its own, as `python -m http.server` serves it."""
    servers = [
        ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
        for folder in folders
    ]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


if __name__ == "__main__":
    sys.exit(cli.run(main))
