# `make study` and `make test` set up .venv when needed; `make setup` does that alone.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: setup study test lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[test,reasoning-gym,math,megatron]"
	touch $(STAMP)

study: $(STAMP)
	$(BIN)/moe-rl run studies/routing_replay.py --out runs

test: $(STAMP) lint
	$(BIN)/python -m pytest -n auto

lint: $(STAMP)
	$(BIN)/ruff check .

docs/columns.md: moe_rl/columns.py $(STAMP)
	$(BIN)/python -c "from moe_rl.columns import markdown; print(markdown(), end='')" > $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
