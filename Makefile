# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
unexport PYTHONDONTWRITEBYTECODE  # else every new Python that a test starts compiles all modules anew
export PATH := $(PATH):/usr/sbin:/sbin  # mkfs.ext4, fsfreeze, ip: not on every PATH of root

RANDOM_INPUTS := $(addprefix tests/test_,prepare_fuzz.py config.py masks.py bpe.py token_cache.py readers.py)
PARALLEL := $(addprefix tests/test_,engines.py nodes.py guides_commands.py launch.py launch_line.py bench_scaling.py)

.PHONY: help setup packages demo test test-budget test-kill test-remote test-export test-serve test-board test-parallel test-long fuzz real real-model lint format bench golden clean

help:
	@echo "make demo    set up, then the whole journey: plan, prepare, train, kill, resume, ask (under 4 minutes)"
	@echo "make test    set up, lint, type check, import rules, tests, each within its recorded CPU budget; prints what it skipped"
	@echo "make test-budget  make test's tests, and record the CPU seconds of each: tests/budget.json"
	@echo "make test-kill  a thousand kills and disk failures at every moment of a run, races, damaged and foreign copies (about 20 minutes)"
	@echo "make test-remote  cut connections, killed laptops, supervisors and trainers, limits and faults on a rented box"
	@echo "make test-export  exports killed at random moments, replayed in llama.cpp, onnxruntime and vLLM where installed"
	@echo "make test-serve  ten times the load a server can do, among hostile clients (MINUTES=10), llama.cpp and vLLM where installed"
	@echo "make test-board  the board in Chromium: access, a real box, export and chat, faults, five browsers at once (MINUTES=5)"
	@echo "make test-parallel  every method on every engine, 1 to 4 ranks, two nodes, every failure, every command of the guides"
	@echo "make test-long  what make test leaves out: repeats of bench, the planner's fit, 1,000 inputs through prepare"
	@echo "make fuzz    10,000 random and damaged inputs through prepare (a few minutes)"
	@echo "make real    formats and tokens of real data: SOJOURN_REAL_DATA and SOJOURN_REAL_TOKENIZER name the folders"
	@echo "make real-model  fine-tune a real model on 200 questions (about 20 minutes): SOJOURN_REAL_MODEL names it"
	@echo "make lint    ruff, mypy, import-linter"
	@echo "make bench   this project's own measurements, into benchmarks/results/"
	@echo "make golden  record this machine type's golden losses (after a wanted change of the numbers)"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
	  { echo "sojourn needs Python 3.10 to 3.13; here: $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy python3-venv; } || \
	  { echo "Python's venv is missing; on Debian or Ubuntu: sudo apt-get install python3-venv"; exit 1; }
	@echo "setting up $(VENV) (once; a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,serve,clean,dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt deepspeed || \
	  echo "DeepSpeed could not be installed; its tests are skipped"
	@touch $(READY)

# What tests need of Debian: two machines are two network namespaces; a rented box has a real sshd.
PROGRAMS := ip mkfs.ext4 fsfreeze sshd ssh chromium chromedriver
packages:
	@for program in $(PROGRAMS); do command -v $$program >/dev/null || missing="$$missing $$program"; done; \
	  [ -z "$$missing" ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && \
	    apt-get install -qy iproute2 e2fsprogs util-linux openssh-server openssh-client chromium chromium-driver fonts-noto-cjk; } || \
	  echo "missing:$$missing; tests of two machines, of a frozen disk, of a rented box or of the chat page are skipped; on Debian or Ubuntu: sudo apt-get install iproute2 e2fsprogs util-linux openssh-server chromium chromium-driver"

demo: setup
	@$(BIN)/sojourn demo

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check --quiet src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

# Lint runs beside the tests and prints below them. Four workers for two cores: tests often wait for a process or a disk.
test: setup packages
	@$(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1 & lint=$$!; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -rs --budget check; tested=$$?; \
	  wait $$lint; linted=$$?; cat $(VENV)/lint.log; [ $$tested = 0 ] && [ $$linted = 0 ]

test-budget: setup packages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -rs --budget record

test-kill: setup
	@command -v bindfs >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy bindfs; } || \
	  echo "bindfs is missing, so tests of a mirror that drops are skipped; on Debian or Ubuntu: sudo apt-get install bindfs"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kill -n 2 --dist worksteal -rs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_signals.py -m slow -n 6

test-remote: setup packages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/remote -rs -s

test-export: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/export -n 2 --dist worksteal -rs

test-serve: setup
	SOJOURN_OVERLOAD_MINUTES=$(or $(MINUTES),10) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/serve -rs -s

test-board: setup packages
	SOJOURN_BOARD_MINUTES=$(or $(MINUTES),5) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/board -rs -s
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_board_page.py -m slow -rs

test-parallel: setup packages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "slow or not slow" -n 2 -rs

test-long: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(addprefix --ignore=,$(PARALLEL) tests/test_signals.py) -m slow -n 2 --dist worksteal -rs
	SOJOURN_FUZZ=500 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(RANDOM_INPUTS) -n 2 --dist worksteal

fuzz: setup
	SOJOURN_FUZZ=10000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_prepare_fuzz.py -n 2 --dist worksteal

real: setup
	@: $${SOJOURN_REAL_DATA:?names the folder whose chat/ holds real data} $${SOJOURN_REAL_TOKENIZER:?names a tokenizer}
	$(BIN)/python -m pytest tests/test_formats.py -k real -rs

real-model: setup
	@: $${SOJOURN_REAL_MODEL:?names a folder or a GGUF file, such as SmolLM2-135M-Instruct}
	$(BIN)/python -m pytest tests/test_real_model.py -rs -s

bench: setup
	$(BIN)/python benchmarks/foundation.py

golden: setup
	$(BIN)/python tests/golden.py

clean:
	rm -rf $(VENV) runs prepared .pytest_cache .mypy_cache .ruff_cache
