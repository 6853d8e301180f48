# The service on a CPU: no compiler, no torch, no root, and nothing written outside /tmp.
#   docker build -f docker/service.Dockerfile -t capserve . && docker run -p 8000:8000 capserve
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/capserve
WORKDIR /src
# The dependencies are a layer of their own: they change less often than the code.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
               print('\n'.join(p['dependencies'] + p['optional-dependencies']['cpu']))" > requirements.txt \
 && /opt/capserve/bin/pip install -r requirements.txt -c constraints.txt
COPY README.md LICENSE ./
COPY service service
RUN /opt/capserve/bin/pip install --no-deps .

FROM python:${PYTHON}-slim
COPY --from=build /opt/capserve /opt/capserve
COPY models /models
ENV PATH=/opt/capserve/bin:$PATH PYTHONUNBUFFERED=1 CAPSERVE_HOST=0.0.0.0 CAPSERVE_MODELS=/models CAPSERVE_LOG_FORMAT=json
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --start-interval=1s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ.get(\"CAPSERVE_PORT\", 8000)}/readyz')"]
ENTRYPOINT ["capserve"]
CMD ["serve"]
