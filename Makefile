# Every target does its own set-up: system packages, a virtual environment, torch, the build.
# Stamp files remember what is done, so a second call starts at once. `make help` lists targets.
#
#   TORCH_SPEC      what pip installs where no torch is found (default torch==2.13.0). pip takes the
#                   build that its package index offers; for a CPU-only build, point
#                   PIP_EXTRA_INDEX_URL at PyTorch's index of CPU wheels, or install torch first.
#                   test-torch and wheels want an exact version: torch==2.12.1
#   BASE_PYTHON     the Python that .venv is made by (default python3)
#   CMAKE_PREFIX_PATH  where to look for protobuf if it is not installed in the system
#   TRAIN_ARGS, PYTEST_ARGS, BENCH_ARGS, SOAK_ARGS, TRIAL_ARGS  passed on to train, test, bench, soak
#                   and test-torch (TRIAL_ARGS=--without-cuda)
#   WHEEL_TORCH     what else wheel-test tries the wheel beside: another build of the same PyTorch
#   FUZZ            the tools of tests/fuzz that fuzz runs, each with FUZZ_ARGS (--seconds, --count)
#   ASAN_TESTS, ASAN_CUDA_TESTS, TSAN_TESTS  what asan and tsan run
#   ARM64_TESTS     what test-arm64 runs under qemu (default: the kernels for NEON)
#   COMPILERS       compilers that `compilers` tries: any names of g++ and clang++
#   PYTEST_WORKERS  processes that run the tests (default 2; 0 for none but pytest itself)

TORCH_SPEC ?= torch==2.13.0
TORCH_OLDEST := 2.11
# Other versions that the tests run beside: test-torch one of them, test-all one in turn.
OTHER_TORCHES := 2.11.0 2.12.1 2.14.1
BASE_PYTHON ?= python3
TRAIN_ARGS ?=
PYTEST_ARGS ?=
# Processes that run the tests side by side; 0 runs them in one.
PYTEST_WORKERS ?= 2
# Each begins with a run of files, which share what they have made, and takes tests of another one
# when it has none left.
IN_PARALLEL = -n $(PYTEST_WORKERS) --dist worksteal
BENCH_ARGS ?=
SOAK_ARGS ?=
# What trains through other packages, starts processes, runs documents or random programs, compares
# with onnxruntime, and what users of ONNX Runtime Training know by name.
REST_OF_TESTS := benchmarks docs ecosystem examples fuzz onnx_modules onnxruntime_training \
  operators soak
# About a tenth, by what they ask of PyTorch: private names, capture, `out=` forms, optimizers, small
# models of Hugging Face's. test-torch runs these, the benchmarks' models, and the tests of CUDA.
TENTH_OF_TESTS := pytorch capture run out_forms torch_ort/test_compiled_optimizers.py \
  torch_ort/test_fused_adam.py torch_ort/test_lamb.py torch_ort/test_optim.py \
  ortmodule/test_families.py torch_ort/test_transformers.py
# Graphs, plans, regions, what runs them, and files that others have written.
ASAN_TESTS ?= tests/ir tests/passes tests/plan tests/cpu tests/run tests/fuzz/test_files.py \
  tests/torch_ort/test_given_memory.py
# The generator of CUDA's kernels and what runs them, on the test device.
ASAN_CUDA_TESTS ?= tests/cuda_kernels
ARM64_TESTS ?= tests/cpu $(patsubst %,tests/torch_ort/test_%.py,fused_adam lamb optim) -k neon
# All that starts threads.
TSAN_TESTS ?= tests/ortmodule/test_threads.py tests/ortmodule/test_call_guard.py \
  tests/functions/test_contexts.py tests/torch_ort/test_placed_results.py \
  tests/torch_ort/test_delivered_gradients.py::test_dropped_in_other_threads \
  tests/torch_ort/test_semantics_contexts.py
# Those of these that are installed.
COMPILERS ?= $(foreach name,g++-11 g++-12 g++-13 g++-14 \
  clang++-15 clang++-16 clang++-17 clang++-18 clang++-19,$(if $(shell command -v $(name)),$(name)))
# What differs from this commit is read by clang-tidy, but for rooms with many headers of torch's, and
# for the kernels of all processors: there is no command that compiles those of others.
TIDY_AGAINST ?= HEAD
TIDY_FILES := $(foreach room,base ir region passes plan cpu cuda optim layers capture,'csrc/$(room)/*.cpp') \
  ':(exclude)csrc/cpu/kernels_*.cpp'
# What is tried with random input, and for how long each: --seconds or --count.
FUZZ ?= files programs
FUZZ_ARGS ?= --seconds 600

# An active virtual environment is used as it is, else .venv is made.
ENV := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),$(CURDIR)/.venv)
PYTHON := $(ENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check -q
# pip where it compiles: -v passes on what ninja says of its progress. The rest goes into a log.
BUILD_WITH_PIP = $(PYTHON) cmake/progress.py --log build/$(1).log \
  $(PYTHON) -m pip --disable-pip-version-check -v
CONSTRAINT := $(ENV)/torch_ort-constraint.txt
TOOLS := $(ENV)/.torch_ort-tools
# The folder that pyproject.toml names, build/{cache_tag}.
CACHE_TAG := $(shell $(or $(wildcard $(PYTHON)),$(BASE_PYTHON)) \
  -c 'import sys; print(sys.implementation.cache_tag)')
BUILD_DIR := $(CURDIR)/build/$(CACHE_TAG)
# One checkout may serve several environments, each with an editable install of its own.
INSTALLED := $(BUILD_DIR)/.installed$(subst /,-,$(ENV))
# Two builds in one folder at once would break it.
LOCK := flock $(CURDIR)/build/.lock
export PATH := $(ENV)/bin:$(PATH)

# auditwheel leaves these to torch, which is imported first and brings them.
TORCH_LIBRARIES := libc10.so libc10_cuda.so libtorch.so libtorch_cpu.so libtorch_cuda.so \
  libtorch_python.so libgomp.so.1
REPAIR_WHEEL = $(ENV)/bin/auditwheel repair $(TORCH_LIBRARIES:%=--exclude %)

.DELETE_ON_ERROR:
.PHONY: help train test test-rest test-all test-torch test-other test-arm64 trial build wheel wheels \
  wheel-arm64 wheel-test \
  bench fuzz soak style format asan tsan compilers clean FORCE

help:
	@echo 'make train       train the example transformer through the engine; draws curve.png (TRAIN_ARGS="--epochs 1")'
	@echo 'make test        run the tests (PYTEST_ARGS="-m slow" for the slow ones, "-m cuda" for those of CUDA)'
	@echo 'make test-rest   run the tests that make test leaves out: other packages, processes, documents (test-all: all tests)'
	@echo 'make test-torch  a tenth of them beside another PyTorch, in build/torch-* (TORCH_SPEC=torch==2.12.1)'
	@echo 'make test-arm64  wheel-arm64, and the tests of its kernels under qemu (20 minutes; ARM64_TESTS)'
	@echo 'make build       build the extension, or what changed of it'
	@echo 'make wheel       build dist/torch-*/*.whl, which carries libprotobuf'
	@echo 'make wheels      build one for each Python of this machine that the PyTorch of TORCH_SPEC has a build for'
	@echo 'make wheel-arm64 build one for aarch64, by a cross compiler and a Python under qemu (4 GB to download)'
	@echo 'make wheel-test  try that wheel in an empty virtual environment'
	@echo 'make bench       time products, optimizers, memory budgets, and training steps against other backends (BENCH_ARGS=--quick)'
	@echo 'make fuzz        try new random files and programs; adds up in build/fuzz (FUZZ_ARGS="--seconds 60")'
	@echo 'make soak        train for 20,000 steps on either road, and see that memory stays flat'
	@echo 'make style       ruff, clang-format, clang-tidy on changed files (TIDY_AGAINST), and the style tests'
	@echo 'make format      write what make style asks for'
	@echo 'make asan        tests of memory under the address and undefined sanitizers (ASAN_TESTS)'
	@echo 'make tsan        tests of threads under the thread sanitizer (TSAN_TESTS)'
	@echo 'make compilers   compile all without warnings by each compiler that is installed (COMPILERS="g++-14 clang++-19")'
	@echo 'make clean       remove what was built'

train: build $(ENV)/.torch_ort-examples
	$(PYTHON) examples/train_transformer.py --plot curve.png $(TRAIN_ARGS)

# Arguments choose among all tests.
test: build $(ENV)/.torch_ort-test
	$(PYTHON) -m pytest $(IN_PARALLEL) \
	  $(or $(PYTEST_ARGS),$(REST_OF_TESTS:%=--ignore=tests/%))

test-rest: build $(ENV)/.torch_ort-test
	$(PYTHON) -m pytest $(IN_PARALLEL) $(REST_OF_TESTS:%=tests/%)

test-all: test test-rest test-other

# A copy of the checkout has an environment and a build of its own, of which this one sees nothing.
# An active environment is not used there, nor is a torch of the system's Python.
TORCH_VERSION = $(patsubst torch==%,%,$(TORCH_SPEC))
TORCH_DIR = $(CURDIR)/build/torch-$(TORCH_VERSION)
IN_COPY = $(MAKE) -C $(TORCH_DIR)/checkout VIRTUAL_ENV= TORCH_OLDEST=999 TORCH_SPEC=$(TORCH_SPEC)
test-torch:
	$(if $(filter torch==%,$(TORCH_SPEC)),,$(error TORCH_SPEC: got $(TORCH_SPEC), want torch==<version>))
	$(BASE_PYTHON) cmake/checkout.py $(TORCH_DIR)/checkout
	@rm -f $(TORCH_DIR)/record.json
	$(IN_COPY) trial RECORD=$(TORCH_DIR)/record.json; status=$$?; \
	if [ -e $(TORCH_DIR)/record.json ]; then \
	  $(TORCH_DIR)/checkout/.venv/bin/python tests/versions/page.py $(TORCH_DIR)/record.json; \
	fi; exit $$status

trial: build $(ENV)/.torch_ort-test
	$(PYTHON) tests/versions/trial.py --record $(RECORD) --workers $(PYTEST_WORKERS) $(TRIAL_ARGS) \
	  $(TENTH_OF_TESTS:%=tests/%)

# The number of the commit chooses.
TURN = $(shell git rev-list --count HEAD 2>/dev/null || echo 0)
OTHER_TORCH = $(word $(shell expr $(TURN) % $(words $(OTHER_TORCHES)) + 1),$(OTHER_TORCHES))
test-other: build
	@echo 'torch $(OTHER_TORCH) is the other version in turn, of $(OTHER_TORCHES)'
	@if $(PIP) install --dry-run --ignore-installed --no-deps torch==$(OTHER_TORCH); \
	then $(MAKE) test-torch TORCH_SPEC=torch==$(OTHER_TORCH); \
	else echo 'torch $(OTHER_TORCH) cannot be installed here, and is left out'; fi

bench: build $(ENV)/.torch_ort-bench
	$(PYTHON) benchmarks/products.py
	$(PYTHON) benchmarks/optimizers.py
	$(PYTHON) benchmarks/recompute.py
	$(PYTHON) benchmarks/train_step.py $(BENCH_ARGS)

# Each tool goes on where its results file stopped.
fuzz: build $(ENV)/.torch_ort-test
	@mkdir -p build/fuzz
	for tool in $(FUZZ); do \
	  $(PYTHON) tests/fuzz/$$tool.py --results build/fuzz/$$tool.json $(FUZZ_ARGS) || exit 1; \
	done

soak: build
	$(PYTHON) tests/soak/soak.py --road ortmodule $(SOAK_ARGS)
	$(PYTHON) tests/soak/soak.py --road compile $(SOAK_ARGS)

# The module lands beside its sources in torch_ort/ and the editable install points there, so
# ninja is all that an edit needs: seconds for a source file, nothing for a Python file.
build: $(INSTALLED)
	@$(LOCK) $(PYTHON) cmake/progress.py ninja -C $(BUILD_DIR) in_place

style: build $(ENV)/.torch_ort-dev
	$(ENV)/bin/ruff check .
	$(ENV)/bin/ruff format --check .
	$(ENV)/bin/clang-format --dry-run -Werror $$(find csrc tests/emulated -name '*.h' -o -name '*.cpp')
	{ git diff --name-only --diff-filter=d $(TIDY_AGAINST) -- $(TIDY_FILES); \
	  git ls-files --others --exclude-standard -- $(TIDY_FILES); } | \
	  xargs -r -n 2 -P 2 $(ENV)/bin/clang-tidy -p $(BUILD_DIR) --quiet
	$(PYTHON) -m pytest tests/style

format: $(ENV)/.torch_ort-dev
	$(ENV)/bin/ruff check --fix-only -q .
	$(ENV)/bin/ruff format .
	$(ENV)/bin/clang-format -i $$(find csrc tests/emulated -name '*.h' -o -name '*.cpp')

# In the folder of the editable build, whose object files it takes. A wheel fits one minor version of
# Python, which its name has, and one of torch, which its folder has.
MINOR_OF_TORCH = $$($(PYTHON) -c 'import torch; print(".".join(torch.__version__.split(".")[:2]))')
wheel: $(TOOLS) $(ENV)/.torch_ort-dev
	@echo 'building the wheel (some minutes where nothing has been built)'
	@rm -rf build/wheels
	@$(LOCK) $(call BUILD_WITH_PIP,wheel) wheel --no-build-isolation --no-deps -w build/wheels .
	$(REPAIR_WHEEL) -w dist/torch-$(MINOR_OF_TORCH) build/wheels/*.whl

wheels:
	$(if $(filter torch==%,$(TORCH_SPEC)),,$(error TORCH_SPEC: got $(TORCH_SPEC), want torch==<version>))
	$(BASE_PYTHON) cmake/wheels.py --torch $(TORCH_VERSION) --make $(MAKE)

# An environment for aarch64, whose Python runs under qemu. It builds as any other does, but by a
# cross compiler, so that nothing but Python is emulated.
ARM64 := $(CURDIR)/build/arm64
$(ARM64)/bin/python: cmake/arm64.py | $(ENV)/.torch_ort-dev
	$(PYTHON) cmake/arm64.py --torch $(TORCH_VERSION) $(ARM64)

wheel-arm64: $(ARM64)/bin/python $(TOOLS) $(ENV)/.torch_ort-dev
	@echo 'building the wheel for aarch64 (some minutes where nothing has been built)'
	@rm -rf build/wheels-arm64
	@CMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/arm64.cmake $(LOCK) \
	  $(PYTHON) cmake/progress.py --log build/wheel-arm64.log \
	  $(ARM64)/bin/python -m pip --disable-pip-version-check -v wheel --no-build-isolation --no-deps \
	  -C build-dir=build/arm64/build -w build/wheels-arm64 .
	$(REPAIR_WHEEL) -w dist/torch-$(basename $(TORCH_VERSION)) build/wheels-arm64/*.whl

# The tables of the kernels for NEON, and what stands in tests/arm64: training, and machine code. The
# first run on a Neoverse N1, products of bfloat16 on a processor that multiplies these as well.
test-arm64: wheel-arm64 $(ENV)/.torch_ort-test
	$(ARM64)/bin/python -m pip --disable-pip-version-check -q install --no-deps --force-reinstall \
	  dist/torch-$(basename $(TORCH_VERSION))/*_aarch64.whl
	PYTHONSAFEPATH=1 $(ARM64)/bin/python -m pytest -p no:cacheprovider $(ARM64_TESTS)
	PYTHONSAFEPATH=1 QEMU_CPU=max $(ARM64)/bin/python -m pytest -p no:cacheprovider \
	  tests/cpu/test_product.py -k 'neon and bfloat16'
	$(PYTHON) -m pytest tests/arm64 --run-slow

wheel-test: wheel $(ENV)/.torch_ort-test
	$(PYTHON) -m pytest tests/torch_ort/test_wheel.py -m slow

# Builds with a sanitizer stand in environments of their own, which see the packages of the other
# one but not its editable torch_ort; nor do they see the working folder (PYTHONSAFEPATH). All rooms
# are instrumented, Python and torch are not: hence the preloaded runtimes. The first report ends
# its process, and only sys.stderr is captured, so that it comes to the terminal.
SANITIZED_ENV = $(CURDIR)/build/$@-env
define sanitized_build
	$(PYTHON) -m venv --without-pip $(SANITIZED_ENV)
	site=$$($(SANITIZED_ENV)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))') && \
	$(PYTHON) -c 'import sysconfig as s; print(s.get_path("purelib"))' > $$site/packages.pth && \
	$(call BUILD_WITH_PIP,$@) install --no-build-isolation --no-deps --upgrade --target $$site \
	  -C build-dir=build/$@ -C install.strip=false -C cmake.define.TORCH_ORT_SANITIZE=$(1) .
endef
SANITIZED_PYTEST = PYTHONSAFEPATH=1 $(SANITIZED_ENV)/bin/python $(ENV)/bin/pytest --capture=sys \
  $(IN_PARALLEL)

# There is no leak check (Python keeps its own memory) and no container check (half of each
# container's users are not instrumented).
UNDER_ASAN = LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=abort_on_error=1:detect_leaks=0:detect_container_overflow=0:detect_odr_violation=0 \
	UBSAN_OPTIONS=abort_on_error=1:print_stacktrace=1 PYTHONMALLOC=malloc $(SANITIZED_PYTEST)
asan: $(TOOLS) $(ENV)/.torch_ort-test
	$(call sanitized_build,address)
	$(UNDER_ASAN) $(ASAN_TESTS) $(PYTEST_ARGS)
	$(UNDER_ASAN) -m cuda $(ASAN_CUDA_TESTS) $(PYTEST_ARGS)

TSAN_KNOWN := $(CURDIR)/tests/tsan.supp
# OpenMP's barriers are futexes of a runtime that is not instrumented, so there is one OpenMP thread
# and the threads are those of Python and of autograd. The runtime wants addresses that are not
# randomized (setarch -R).
tsan: $(TOOLS) $(ENV)/.torch_ort-test
	$(call sanitized_build,thread)
	setarch -R env LD_PRELOAD="$$(c++ -print-file-name=libtsan.so)" OMP_NUM_THREADS=1 \
	TSAN_OPTIONS=halt_on_error=1:abort_on_error=1:ignore_noninstrumented_modules=1:suppressions=$(TSAN_KNOWN) \
	  $(SANITIZED_PYTEST) $(TSAN_TESTS) $(PYTEST_ARGS)

# Warnings are errors, and nothing is installed: a folder for each compiler, with a module in it.
compilers: $(TOOLS)
	for compiler in $(COMPILERS); do echo "$$compiler" && \
	  cmake -S . -B build/compilers/$$compiler -G Ninja --log-level=WARNING \
	    -DCMAKE_CXX_COMPILER=$$compiler -DPython_EXECUTABLE=$(PYTHON) && \
	  $(PYTHON) cmake/progress.py ninja -C build/compilers/$$compiler _C || exit 1; \
	done

clean:
	rm -rf build dist torch_ort/_C.* torch_ort/_build_info.py
	rm -f $(ENV)/.torch_ort-* $(CONSTRAINT)

# --- set-up --------------------------------------------------------------------------------------

# Nothing is installed where all is there already.
build/.system:
	@mkdir -p build
	@CMAKE_PREFIX_PATH="$(CMAKE_PREFIX_PATH)" sh cmake/system_packages.sh
	@touch $@

# A torch of the system's Python is used where there is one: it may be large, and made for the GPU.
TORCH_FOUND = -c 'import torch; v = torch.__version__.split("."); \
  assert (int(v[0]), int(v[1])) >= tuple(map(int, "$(TORCH_OLDEST)".split(".")))' 2>/dev/null

$(PYTHON): | build/.system
	@if $(BASE_PYTHON) $(TORCH_FOUND); then flags=--system-site-packages; else flags=; fi; \
	echo "making $(ENV)"; $(BASE_PYTHON) -m venv $$flags $(ENV)

# pip must never replace the torch that the extension is built against. The file changes only when
# the installed torch does, and then everything below is made again. Two makes at once each write a
# file of their own first.
$(CONSTRAINT): FORCE | $(PYTHON)
	@$(PYTHON) -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null \
	  || { echo "installing $(TORCH_SPEC)"; $(PIP) install "$(TORCH_SPEC)" numpy; }
	@$(PYTHON) -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $@.$$PPID
	@if cmp -s $@.$$PPID $@; then rm $@.$$PPID; else mv $@.$$PPID $@; fi

$(TOOLS): $(CONSTRAINT) | build/.system
	@echo 'installing the build tools'
	@$(PIP) install -c $(CONSTRAINT) 'pip>=23.1' cmake ninja 'scikit-build-core>=0.10' onnx
	@touch $@

# The build is done by pip here, so that a plain `pip install --no-build-isolation -e .` is the same.
$(INSTALLED): $(TOOLS) pyproject.toml build/.sources
	@echo 'building torch_ort (some minutes the first time)'
	@$(LOCK) $(call BUILD_WITH_PIP,editable) install -c $(CONSTRAINT) --no-build-isolation -e .
	@touch $@

# The editable install holds a list of the Python files, which must follow the folder.
build/.sources: FORCE | build/.system
	@find torch_ort -name '*.py' ! -name _build_info.py | LC_ALL=C sort > $@.$$PPID
	@if cmp -s $@.$$PPID $@; then rm $@.$$PPID; else mv $@.$$PPID $@; fi

$(ENV)/.torch_ort-%: $(CONSTRAINT) pyproject.toml | $(TOOLS)
	@echo 'installing what the $* target needs'
	@$(PYTHON) cmake/extra.py $* > $@.txt
	@$(PIP) install -c $(CONSTRAINT) -r $@.txt && rm $@.txt
	@touch $@
