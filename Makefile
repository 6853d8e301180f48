# Every target makes what it needs in .venv first, so each works as the first command on a fresh machine.

PYTHON ?= python3
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE  # the tests start hundreds of processes, each of which would compile service/ anew
# The two runtimes exclude each other: onnxruntime-gpu where an NVIDIA driver answers, onnxruntime elsewhere.
RUNTIME := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help install run test test-training lint format train bench sbom docker-test clean

help:                    ## this list
	@awk -F ':.*## *' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

install: .venv/all       ## everything: service, training, tools

run: .venv/service       ## serve models/ on http://127.0.0.1:8000
	$(BIN)/capserve serve

# If each process had as many threads of OpenBLAS and torch as there are cores, they would slow each other down.
TOGETHER := OMP_NUM_THREADS=1 $(BIN)/pytest --dist worksteal --numprocesses
test: .venv/test         ## the service's tests, warnings as errors: four at a time, the page's by two, then those that must be alone
	$(TOGETHER) 4 --ignore tests/playground --ignore tests/training -m "not alone"
	$(BIN)/pytest tests/playground --numprocesses 2 --dist worksteal
	$(BIN)/pytest $$(grep -l 'mark\.alone' tests/service/*.py) -m alone

test-training: .venv/all ## training's tests, and those of the shipped weights
	$(TOGETHER) 3 tests/training

lint: .venv/all          ## format, style, types, import directions, and what is in docker/
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	docker/lint.sh

format: .venv/all        ## let ruff write the format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

PRESET ?= compact
train: .venv/all         ## train PRESET (compact) into runs/PRESET, or go on with it
	$(BIN)/captrain train --preset $(PRESET) --out runs/$(PRESET) $(if $(wildcard runs/$(PRESET)/checkpoint.pt),--resume)

bench: .venv/all         ## the speed claims, measured as ratios on this machine
	$(BIN)/python -m benchmarks.training_step
	$(BIN)/python -m benchmarks.encoders
	$(BIN)/python -m benchmarks.pictures
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.overload

TARGET ?= cpu
SBOM ?= sbom.cdx.json
sbom: .venv/test         ## what the image TARGET (cpu, gpu) ships, as CycloneDX
	$(BIN)/python docker/shipped.py $(TARGET) | $(BIN)/cyclonedx-py requirements - --pyproject pyproject.toml \
	    --output-reproducible --of JSON --output-file $(SBOM)

DOCKER_TEST ?=
docker-test:             ## the CPU's image and the compose files on a real Docker engine; DOCKER_TEST=--gpu tries the GPU's image too
	$(PYTHON) docker/trial.py $(DOCKER_TEST)

PYTHONS := $(shell sed -n 's/^requires-python = "\(.*\)"/\1/p' pyproject.toml)
.venv/bin/python:        # checked first: a .venv of the wrong Python would have to be removed by hand
	@$(PYTHON) -c 'import re, sys; found = sys.version_info[:2]; \
	    low, high = (tuple(map(int, each.split("."))) for each in re.findall(r"[\d.]+", "$(PYTHONS)")); \
	    low <= found < high or sys.exit("expected Python $(PYTHONS), found %d.%d; name another: make PYTHON=python3.12" % found)'
	$(PYTHON) -m venv .venv

# Beside torch not with constraints-cuda.txt: torch sets the versions of CUDA and cuDNN, and ONNX Runtime uses them too.
CUDA := $(if $(filter gpu,$(RUNTIME)),$(if $(wildcard .venv/lib/python*/site-packages/torch),,-c constraints-cuda.txt))
.venv/service: .venv/bin/python pyproject.toml constraints.txt constraints-cuda.txt
	$(PIP) install -c constraints.txt $(CUDA) -e '.[$(RUNTIME)]'
	touch $@

# Not compiled in advance: most of it is never imported, and Python compiles what is.
.venv/test: .venv/bin/python pyproject.toml constraints.txt constraints-cuda.txt
	$(PIP) install --no-compile -c constraints.txt $(CUDA) -e '.[$(RUNTIME),test]'
	touch $@ .venv/service

.venv/all: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) install --no-compile -c constraints.txt -e '.[$(RUNTIME),train,dev]'
	touch $@ .venv/test .venv/service

clean:                   ## remove what make made
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
