"""`make fuzz`: every fuzzer for a while, one after the other; exit code 1 if one of them found something.

A while is processor time, so that a busy machine tries as many inputs as a quiet one.

What they learn stays in build/fuzz/NAME and is the start of the next run, and the inputs of all runs are
added up in build/fuzz/NAME-inputs.txt; an input that failed is build/fuzz/NAME-found-*. `python
tests/fuzz/fuzz_tables.py FILE` runs one input again. A new corpus in C++ begins with seeds/NAME.hex.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "fuzz"
TARGETS = ("tables", "artifact", "packing", "runtime")
IN_CPP = {"packing": (ROOT, "ON"), "runtime": (ROOT / "kernels" / "runtime", "address,undefined")}
MEMORY_MIB = 4096


def seeds(name: str) -> None:
    """Good inputs to start from, if there are none yet."""
    corpus = BUILD / name
    corpus.mkdir(parents=True, exist_ok=True)
    if any(corpus.iterdir()):
        return
    if name in IN_CPP:
        stored = Path(__file__).parent / "seeds" / f"{name}.hex"  # an input in a line
        for number, line in enumerate(stored.read_text().split() if stored.is_file() else []):
            (corpus / f"seed-{number}").write_bytes(bytes.fromhex(line))
        return
    code = f"import fuzz_{name}, sys; sys.stdout.buffer.write(repr(fuzz_{name}.seeds()).encode())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, check=True
    )
    for number, content in enumerate(ast.literal_eval(done.stdout.decode())):
        (corpus / f"seed-{number}").write_bytes(content)


def command(name: str) -> list[str] | str:
    """What starts a fuzzer, or why it cannot be started here."""
    if name not in IN_CPP:
        if importlib.util.find_spec("atheris") is None:
            return "atheris is not installed (pip install atheris)"
        return [sys.executable, str(Path(__file__).with_name(f"fuzz_{name}.py"))]
    clang = os.environ.get("CLANG") or shutil.which("clang++")
    cmake = Path(sys.executable).with_name("cmake")
    if clang is None:
        return "clang++ is not installed (Debian: apt install clang libclang-rt-dev)"
    source, sanitizers = IN_CPP[name]
    folder = BUILD / f"cmake-{name}"
    options = [f"-DCMAKE_CXX_COMPILER={clang}", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    options += ["-DMREM_BUILD_FUZZERS=ON", f"-DMREM_SANITIZE={sanitizers}"]
    if name == "packing":
        options.append("-DMREM_BUILD_EXTENSION=OFF")
    configure = [cmake, "-S", source, "-B", folder, "--fresh", *options]
    for step in (configure, [cmake, "--build", folder, "--target", f"fuzz_{name}"]):
        done = subprocess.run(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            return f"{clang} cannot build it:\n{done.stdout[-2000:]}"
    return [str(folder / f"fuzz_{name}")]


def fuzz(name: str, seconds: int) -> bool:
    """Whether the fuzzer ran without finding anything, or could not run at all."""
    start = command(name)
    if isinstance(start, str):
        print(f"{name}: skipped, because {start}", flush=True)
        return True
    seeds(name)
    log = BUILD / f"{name}.log"
    options = [f"-rss_limit_mb={MEMORY_MIB}", "-timeout=60", "-max_len=4096", "-print_final_stats=1"]
    with log.open("w") as output:
        process = psutil.Popen(
            [*start, *options, f"-artifact_prefix={BUILD}/{name}-found-", str(BUILD / name)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        used = watched(process, seconds)
    tried = inputs_tried(log.read_text(errors="replace"))
    outcome = "nothing found" if process.returncode == 0 else f"FOUND SOMETHING, see {log}"
    counted = f"{tried:,} inputs in {used:.0f} s of processor time, {added_up(name, tried):,} in all"
    print(f"{name}: {outcome} ({counted})", flush=True)
    return process.returncode == 0


def watched(process: psutil.Popen, seconds: float) -> float:
    """Let a fuzzer end after that much processor time; returns how much it took."""
    used = 0.0
    while process.poll() is None:
        with suppress(psutil.Error):
            times = process.cpu_times()
            used = times.user + times.system
        if used >= seconds:
            process.send_signal(signal.SIGUSR1)  # libFuzzer ends after the input at hand
        time.sleep(0.2)
    return used


def inputs_tried(log: str) -> int:
    """How many inputs a run says that it has tried; one that found something ends without a total."""
    found = re.findall(r"^(?:Done |#|stat::number_of_executed_units: *)(\d+)", log, flags=re.MULTILINE)
    return int(found[-1]) if found else 0


def added_up(name: str, tried: int) -> int:
    """The inputs of all runs that share a corpus, this one included."""
    total = BUILD / f"{name}-inputs.txt"
    before = int(total.read_text()) if total.is_file() else 0
    total.write_text(f"{before + tried}\n")
    return before + tried


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="NAME", help=", ".join(TARGETS))
    parser.add_argument(
        "--seconds", type=int, default=60, help="of processor time for each of them (default 60)"
    )
    given = parser.parse_args()
    results = [fuzz(name, given.seconds) for name in given.targets]  # all of them, whatever one finds
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
