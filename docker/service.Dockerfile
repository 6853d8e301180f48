# The service: no compiler, no torch, no root, and nothing written outside /tmp. Two targets:
#   docker build -f docker/service.Dockerfile --target cpu -t capserve:cpu . && docker run -p 8000:8000 capserve:cpu
#   docker build -f docker/service.Dockerfile --target gpu -t capserve:gpu . && docker run --gpus all -p 8000:8000 capserve:gpu
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/capserve
WORKDIR /src
COPY pyproject.toml constraints.txt ./
# Dependencies are a layer of their own: they change less often than the code.
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
               e = p['optional-dependencies']; \
               [open(extra, 'w').write('\n'.join(p['dependencies'] + e['otel'] + e[extra])) for extra in ('cpu', 'gpu')]"

FROM build AS build-cpu
RUN pip --python /opt/capserve install -r cpu -c constraints.txt \
 && find /opt/capserve -name tests -prune -exec rm -r {} +
COPY README.md LICENSE ./
COPY service service
RUN pip --python /opt/capserve install --no-deps . && rm /opt/capserve/bin/captrain  # it trains, and nothing here does

FROM build AS build-gpu
# CUDA and cuDNN are NVIDIA's wheels, which also contain what only compilers read: headers, static libraries, a second nvrtc.
COPY constraints-cuda.txt ./
RUN pip --python /opt/capserve install -r gpu -c constraints.txt -c constraints-cuda.txt \
 && find /opt/capserve \( -name tests -o -path '*/nvidia/*/include' -o -name '*.a' -o -name '*.alt.so*' \) -prune -exec rm -r {} +
COPY README.md LICENSE ./
COPY service service
RUN pip --python /opt/capserve install --no-deps . && rm /opt/capserve/bin/captrain  # it trains, and nothing here does

FROM python:${PYTHON}-slim AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="capserve" \
      org.opencontainers.image.description="Capsule Networks as a service" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# numpy's OpenBLAS has nothing large to do here; by default it would keep a thread for every core in each process.
ENV PATH=/opt/capserve/bin:$PATH PYTHONUNBUFFERED=1 OPENBLAS_NUM_THREADS=1 CAPSERVE_HOST=0.0.0.0 CAPSERVE_MODELS=/models CAPSERVE_LOG_FORMAT=json
USER 10001:10001
EXPOSE 8000
# bash asks, since starting Python costs fifty times as much: on a busy host the service would then look unhealthy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --start-interval=1s CMD ["bash", "-c", \
    "exec 3<>/dev/tcp/127.0.0.1/${CAPSERVE_PORT:-8000} && printf 'GET /readyz HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n' >&3 && read -r _ status _ <&3 && [ \"$status\" = 200 ]"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["capserve"]
CMD ["serve"]

FROM runtime AS gpu
# Says what the NVIDIA runtime puts into the container; with CAPSERVE_DEVICE=cuda the service does not start if that does not work.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility CAPSERVE_DEVICE=cuda
COPY --from=build-gpu /opt/capserve /opt/capserve
COPY models /models

# The last target is the one that is built by default.
FROM runtime AS cpu
ENV CAPSERVE_DEVICE=cpu
COPY --from=build-cpu /opt/capserve /opt/capserve
COPY models /models
