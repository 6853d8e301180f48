#!/usr/bin/env bash
# Checks docker/ and docker-compose.yml with whichever linters are installed, and names those that are not.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH

has() { command -v "$1" >/dev/null || { echo "$1: skipped, it is not installed"; return 1; }; }

if has hadolint; then
  hadolint docker/*.Dockerfile
  echo "hadolint: $(ls docker/*.Dockerfile | wc -l) Dockerfiles"
fi

if docker compose version >/dev/null 2>&1; then
  over=()
  for file in docker-compose.yml docker/compose.cpu.yml docker/compose.replicas.yml; do
    over+=(-f "$file")
    docker compose "${over[@]}" --profile train config --quiet
  done
  docker compose -f docker-compose.yml -f docker/compose.replicas.yml config --quiet
  echo "docker compose config: 4 combinations"
else
  echo "docker compose config: skipped, it is not installed"
fi

if has promtool; then
  promtool check config docker/prometheus/prometheus.yml >/dev/null
  promtool test rules docker/prometheus/rules.test.yml >/dev/null
  echo "promtool: configuration and rules, with their tests"
fi

if has kubernetes-validate; then
  # Kustomizations and the Prometheus operator's ServiceMonitor are not Kubernetes' own; tests/docker checks those.
  kubernetes-validate --strict --quiet --no-warn docker/kubernetes/base/*.yaml
  if has kubectl; then
    built=$(mktemp --suffix .yaml)
    for overlay in docker/kubernetes/*/; do
      kubectl kustomize "$overlay" > "$built"
      kubernetes-validate --strict --quiet --no-warn "$built"
    done
    rm "$built"
    echo "kubernetes-validate: $(ls -d docker/kubernetes/*/ | wc -l) kustomizations"
  else
    echo "kubernetes-validate: the base alone, kubectl is not installed"
  fi
fi

python docker/shipped.py audit
