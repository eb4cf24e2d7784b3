# Daily commands. Each sets up what it needs: in a new clone `make demo` or `make test` is enough.
# Needs: Python >= 3.10 with venv, and for full speed a C++ compiler. Everything is installed into .venv.
#
#   make setup                      only the set-up (does nothing if nothing changed)
#   make setup PYTHON=python3.12    choose the interpreter
#   make setup TORCH_ARGS="--index-url URL"   where to get PyTorch, e.g. from its CPU index
#   make setup TORCH_INSTALL="torch==2.13.0"  which PyTorch
#   make setup-gpu                  the CUDA builds of PyTorch and onnxruntime, also where make setup ran before
#   make test PYTEST_ARGS="-k packing"
#   make test TEST_PROCESSES=0      in one process, to see what a test prints
#   make web-test WEB_ARGS="result --screenshots shots"   your own results instead of tiny ones
#   make fuzz FUZZ_SECONDS=900 FUZZ_TARGETS="tables packing"
#   make optimum RESULT=mrem-demo   your own result folder instead of a tiny one; also for `make oldest`
#   make oldest OLD_PYTHON=/path/to/python3.10   if the oldest onnxruntime has no wheel for this Python

VENV ?= .venv
PYTHON ?=
TORCH_VERSION ?= 2.13.0
TORCH_INSTALL ?=
TORCH_ARGS ?=
PYTEST_ARGS ?=
FAULTS_ARGS ?=
WEB_ARGS ?=
TEST_PROCESSES ?= 2
OTHER_TRITON ?= 3.7.1
DEMO_ARGS ?=
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?=
RESULT ?=

# Some virtual machines announce AMX but do not allow it; oneDNN then dies with SIGILL.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

PY := $(VENV)/bin/python
PIP := $(PY) -m pip
CPP := $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
CPP_RUNTIME := $(wildcard kernels/runtime/*.cpp kernels/runtime/*.h kernels/runtime/*/*.cpp kernels/runtime/*/*.h)
CPP_BUILT := $(filter-out kernels/cpu/test_% kernels/cpu/fuzz_%,$(CPP))
RUNTIME_BUILT := $(filter-out kernels/runtime/test_% kernels/runtime/fuzz_% kernels/runtime/bench_%,$(CPP_RUNTIME)) \
    $(wildcard kernels/runtime/CMakeLists.txt kernels/runtime/*.cmake kernels/runtime/python/*.*)
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
EXTRAS = $(shell cat $(VENV)/.extras 2>/dev/null || echo cpu)

# Optimized a little: without, the tests of the products take minutes.
RUNTIME_TESTS = $(VENV)/bin/cmake -S kernels/runtime --fresh -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=-O1 \
    -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja -DMREM_BUILD_TESTS=ON

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-gpu test test-jobs web-test gpu-compile gpu-check demo lint format typecheck sanitize sanitize-runtime \
    runtime-arm wheel-runtime fuzz faults bench docs \
    optimum oldest clean distclean

help:
	@echo "make setup      install everything into $(VENV)"
	@echo "make setup-gpu  the same with the CUDA builds of PyTorch and onnxruntime"
	@echo "make demo       quantize a small sentiment model and write a report"
	@echo "make test       run the tests"
	@echo "make test-jobs  whole runs of mrem-p: killed, interrupted, on two nodes"
	@echo "make web-test   the page of mrem web in headless Chromium; needs npm and Chromium"
	@echo "make lint       check the style with ruff and clang-format"
	@echo "make format     format all files with ruff and clang-format"
	@echo "make typecheck  check the types with mypy"
	@echo "make sanitize   C++ tests under the address, undefined-behaviour and thread sanitizers"
	@echo "make wheel-runtime  dist/mrem_runtime-*.whl: the CPU runtime for onnxruntime, by itself"
	@echo "make runtime-arm  the C++ tests of the CPU runtime on an emulated 64-bit ARM processor"
	@echo "make fuzz       any bytes into the readers of data and results, packing and the CPU runtime, a minute each"
	@echo "make faults     disturb the commands in thousands of ways; an hour on two cores (docs/reliability.md)"
	@echo "make gpu-compile  the Triton kernels compiled for seven GPUs and checked, without a GPU"
	@echo "make gpu-check  nine checks on a machine with GPUs, ten minutes at most"
	@echo "make bench      micro-benchmarks of the kernels"
	@echo "make docs       write docs/recipe.md from the options of the recipe"
	@echo "make optimum    run exported models in optimum-onnx, in a separate environment"
	@echo "make oldest     run exported models in the oldest onnxruntime of each profile"
	@echo "make clean      remove what was built; make distclean also removes $(VENV)"

setup: $(READY)

# -- set-up: interpreter, PyTorch, then the package with its extension ------------------------------------

$(VENV)/.created:
	@found=; \
	for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10 python3.14 python); do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	        found="$$candidate"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "error: Python 3.10 or newer is needed, but $(or $(PYTHON),python3) is" \
	         "$$($(or $(PYTHON),python3) --version 2>&1 | head -n 1)"; \
	    echo "  -> install a newer Python, or name one: make setup PYTHON=/path/to/python3.12"; \
	    exit 1; \
	fi; \
	if ! "$$found" -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "error: $$found cannot create virtual environments: its venv or ensurepip module is missing"; \
	    echo "  -> install them (on Debian and Ubuntu: apt install python3-venv), or choose another PYTHON=..."; \
	    exit 1; \
	fi; \
	echo "creating $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv $(VENV)
	@$(PIP) install --quiet "pip>=22"
	@touch $@

# First the CPU build, by its name in PyTorch's CPU index. Where the configured index has no such name (PyPI),
# the ordinary build: on Linux it includes CUDA and takes several GB, hence the hint.
$(VENV)/.torch: $(VENV)/.created
ifneq ($(strip $(TORCH_INSTALL)),)
	$(PIP) install $(TORCH_ARGS) $(TORCH_INSTALL)
else
	@echo "installing PyTorch $(TORCH_VERSION), the CPU build if there is one"
	@$(PIP) install $(TORCH_ARGS) "torch==$(TORCH_VERSION)+cpu" 2>$(VENV)/torch.log || { \
	    grep -q "No matching distribution" $(VENV)/torch.log || { cat $(VENV)/torch.log; exit 1; }; \
	    echo "there is no separate CPU build in the configured package index; installing the ordinary build."; \
	    echo "On Linux that is a large download. For the small one, stop and give PyTorch's CPU index:"; \
	    echo "  make setup TORCH_ARGS=\"--index-url URL\"   (URL: see 'CPU' at PyTorch's 'Get started' page)"; \
	    $(PIP) install $(TORCH_ARGS) "torch==$(TORCH_VERSION)"; }
endif
	@touch $@

# PyTorch is named again at its installed version, so that no dependency can replace it.
$(INSTALLED): $(VENV)/.torch pyproject.toml setup.py CMakeLists.txt $(CPP_BUILT)
	@installed=$$($(PY) -c 'from importlib.metadata import version; print(version("torch"))') && \
	echo "installing mrem_deploy and its dependencies; PyTorch stays at $$installed" && \
	$(PIP) install --editable ".[$(EXTRAS),dev]" "torch==$$installed"
	@$(PY) -m mrem_deploy.kernels
	@touch $@

# The CPU runtime, a package of its own. Without a C++ toolchain all the rest works; MREM_REQUIRE_EXT=1 makes
# that an error.
$(READY): $(INSTALLED) $(RUNTIME_BUILT)
	@$(PY) kernels/runtime/python/setup.py toolchain; found=$$?; \
	if [ $$found = 3 ]; then echo "Everything works without it, but ONNX models run slower on CPUs (docs/runtime.md)"; \
	elif [ $$found != 0 ]; then exit 1; \
	else $(PIP) install --quiet --no-build-isolation --no-deps --editable kernels/runtime/python; fi
	@touch $@

# pip takes a CPU build for the version that is asked for, and both builds of onnxruntime have the same files:
# what is there goes first. The choice is kept for later runs of make.
setup-gpu: $(VENV)/.created
	@$(PIP) uninstall --yes --quiet torch onnxruntime 2>/dev/null
	@rm -f $(VENV)/.torch $(INSTALLED) $(READY)
	@echo gpu > $(VENV)/.extras
	@$(MAKE) --no-print-directory setup TORCH_INSTALL="$(or $(TORCH_INSTALL),torch==$(TORCH_VERSION))"
	$(PY) -m mrem_deploy doctor

# -- what people do ----------------------------------------------------------------------------------------

demo: $(READY)
	$(PY) -m mrem_deploy.quantize $(DEMO_ARGS)

# Two at a time; the tests of a file stay together, because they share what is slow to make.
test: $(READY)
	$(PY) -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not gpu_compile and not jobs" $(PYTEST_ARGS)

# One at a time: each starts several processes itself.
test-jobs: $(READY)
	$(PY) -m pytest -m jobs tests/benchmarks tests/train/mrem_p $(PYTEST_ARGS)

# Not part of `make test`. $CHROMIUM names the browser, if it is not on the PATH.
web-test: $(READY)
	PYTHONPATH=tests/helpers $(PY) -u tests/helpers/web_site.py $(WEB_ARGS)

# With the newest Triton and with the one that PyTorch $(TORCH_VERSION) brings, in a folder of its own.
gpu-compile: $(READY) build/triton-$(OTHER_TRITON)
	MREM_OTHER_TRITON=$(abspath build/triton-$(OTHER_TRITON)) $(PY) -m pytest -m gpu_compile tests/kernels

build/triton-$(OTHER_TRITON): $(VENV)/.created
	$(PIP) install --quiet --no-deps --target $@ "triton==$(OTHER_TRITON)"

gpu-check: $(READY)
	$(PY) tests/helpers/gpu_check.py

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP) $(CPP_RUNTIME)

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP) $(CPP_RUNTIME)

# mypy does not follow the folders that setup.py maps into the package, so it reads a built copy.
typecheck: $(READY)
	@rm -rf build/typecheck
	@$(PY) setup.py --quiet build_py --build-lib build/typecheck
	cd build/typecheck && $(abspath $(PY)) -m mypy --config-file $(CURDIR)/pyproject.toml \
	    --cache-dir $(CURDIR)/.mypy_cache -p mrem_deploy

sanitize: $(READY)
	$(VENV)/bin/cmake -S . -B build/sanitize --fresh -G Ninja -DCMAKE_BUILD_TYPE=Debug \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja \
	    -DMREM_BUILD_EXTENSION=OFF -DMREM_BUILD_TESTS=ON -DMREM_SANITIZE=ON
	$(VENV)/bin/cmake --build build/sanitize
	./build/sanitize/test_packing
	./build/sanitize/test_training
	$(VENV)/bin/cmake -S . -B build/sanitize-extension --fresh -G Ninja -DCMAKE_BUILD_TYPE=Debug \
	    -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja -DPython_EXECUTABLE=$(abspath $(PY)) \
	    -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir) -DMREM_SANITIZE=ON
	$(VENV)/bin/cmake --build build/sanitize-extension
	MREM_TEST_EXTENSION=$$(ls $(CURDIR)/build/sanitize-extension/_cpu*.so) ASAN_OPTIONS=detect_leaks=0 \
	    LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	    $(PY) -m pytest -n0 -p no:cacheprovider tests/kernels/test_cpu_bindings.py
	@$(MAKE) --no-print-directory sanitize-runtime

# Races need few sizes but every way that operators share work, so test_operators is enough for the threads.
sanitize-runtime: $(READY)
	$(RUNTIME_TESTS) -B build/sanitize-runtime -DMREM_SANITIZE=address,undefined
	$(VENV)/bin/cmake --build build/sanitize-runtime
	$(VENV)/bin/ctest --test-dir build/sanitize-runtime --output-on-failure --parallel 2
	$(RUNTIME_TESTS) -B build/sanitize-threads -DMREM_SANITIZE=thread
	$(VENV)/bin/cmake --build build/sanitize-threads --target test_operators
	./build/sanitize-threads/test_operators

# The portable code on a 64-bit ARM processor, emulated. Debian: apt install g++-aarch64-linux-gnu qemu-user
ARM = aarch64-linux-gnu
runtime-arm: $(READY)
	$(RUNTIME_TESTS) -B build/runtime-arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	    -DCMAKE_CXX_COMPILER=$(ARM)-g++ "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/$(ARM)"
	$(VENV)/bin/cmake --build build/runtime-arm
	$(VENV)/bin/ctest --test-dir build/runtime-arm --output-on-failure

# A wheel for any Python 3 of this platform, with nothing of mrem_deploy in it.
wheel-runtime: $(READY)
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist kernels/runtime/python

fuzz: $(READY)
	$(PY) tests/fuzz/run.py --seconds $(FUZZ_SECONDS) $(FUZZ_TARGETS)

# Goes on where it was interrupted; a part: make faults FAULTS_ARGS="--minutes 5"
faults: $(READY)
	$(PY) -m tests.campaign $(FAULTS_ARGS)

bench: $(READY)
	$(PY) -m mrem_deploy.benchmarks.packing

docs: $(READY)
	$(PY) -m mrem_deploy.recipe_page > docs/recipe.md

# -- exported models in other environments, all of them under build/ ---------------------------------------

build/onnx-result: $(READY) $(wildcard export/*.py)
	$(PY) -u tests/helpers/environments.py result $@
	@touch $@

# The same rules as above make the interpreter and PyTorch of the second environment.
optimum: $(if $(RESULT),,build/onnx-result) $(READY)
	@$(MAKE) --no-print-directory VENV=build/optimum build/optimum/.torch
	@installed=$$(build/optimum/bin/python -c 'from importlib.metadata import version; print(version("torch"))') && \
	build/optimum/bin/python -m pip install --quiet "optimum-onnx[onnxruntime]" "torch==$$installed"
	build/optimum/bin/python tests/helpers/optimum_label.py $(or $(RESULT),build/onnx-result/4-4-8 build/onnx-result/2-2-8)

oldest: $(if $(RESULT),,build/onnx-result) $(READY)
	$(PY) -u tests/helpers/environments.py oldest $(or $(RESULT),build/onnx-result/4-4-8 build/onnx-result/2-2-8 \
	    build/onnx-result/2-2-8-midrise)

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis kernels/cpu/*.so \
	    kernels/runtime/python/build kernels/runtime/python/*.egg-info kernels/runtime/python/mrem_runtime/*.so \
	    $(INSTALLED) $(READY)
	find mrem_deploy kernels export tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
