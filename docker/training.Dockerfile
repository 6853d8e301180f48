# captrain, with torch for CUDA as the package index has it; runs on a CPU as well.
#   docker build -f docker/training.Dockerfile -t capserve-training .
#   mkdir -p runs && docker run --gpus all --user "$(id -u):$(id -g)" -v ./runs:/runs capserve-training train --preset compact --out /runs/compact
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/capserve
WORKDIR /src
COPY pyproject.toml constraints.txt ./
# ONNX Runtime is the CPU's here: it only compares and quantises exported graphs.
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; e = p['optional-dependencies']; \
               print('\n'.join(p['dependencies'] + e['cpu'] + e['train']))" > requirements.txt \
 && pip --python /opt/capserve install -r requirements.txt -c constraints.txt
COPY README.md LICENSE ./
COPY service service
COPY training training
RUN pip --python /opt/capserve install --no-deps .

FROM python:${PYTHON}-slim
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="capserve-training" \
      org.opencontainers.image.description="Trains, measures and exports Capsule Networks for capserve" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Where there is a GPU, torch compiles kernels for it with a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/capserve /opt/capserve
# Downloaded data sets, and what torch and matplotlib keep, go to the cache; runs and bundles to volumes.
ENV PATH=/opt/capserve/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp XDG_CACHE_HOME=/cache ORT_DISABLE_TELEMETRY=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN install --directory --mode 1777 /cache /runs
USER 10001:10001
WORKDIR /runs
ENTRYPOINT ["captrain"]
CMD ["--help"]
