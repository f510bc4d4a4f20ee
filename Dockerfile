# `docker build .` builds the server for CPUs, `--target cuda` the server for GPUs, `--target load` the load test.
# `--build-arg BASE=IMAGE` replaces the stage "python", whose name Dependabot would not find in an argument.
ARG BASE=python

FROM python:3.11-slim AS python

FROM ${BASE} AS packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/kvasir
WORKDIR /src
COPY pyproject.toml constraints.txt LICENSE README.md ./
COPY kvasir/__init__.py ./kvasir/

# The dependencies come first, because they change less often than the source.
FROM packages AS packages-cpu
RUN /opt/kvasir/bin/pip install --constraint constraints.txt '.[cpu,otel,hub,oci,s3,redis,kv-events]' \
    && rm -r /opt/kvasir/lib/python3*/site-packages/kvasir && /opt/kvasir/bin/pip uninstall --yes pip setuptools

FROM packages AS packages-cuda
RUN /opt/kvasir/bin/pip install --constraint constraints.txt '.[cuda,otel,hub,oci,s3,redis,kv-events]' \
    && rm -r /opt/kvasir/lib/python3*/site-packages/kvasir && /opt/kvasir/bin/pip uninstall --yes pip setuptools

FROM packages AS packages-load
RUN /opt/kvasir/bin/pip install --constraint constraints.txt '.[loadtest]' \
    && rm -r /opt/kvasir/lib/python3*/site-packages/kvasir && /opt/kvasir/bin/pip uninstall --yes pip setuptools

# Without this library the server would use stock operators. setup.py has the flags of the compiler.
FROM packages AS library
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY setup.py ./
COPY kernels ./kernels
RUN /opt/kvasir/bin/pip install --no-deps --target /built . && test -f /built/kvasir/kernels/libkvasir.so

# Some base images contain pip, which no final stage needs.
FROM ${BASE} AS bare
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/ensurepip \
    /usr/local/lib/python3*/site-packages/pip* /usr/local/lib/python3*/site-packages/setuptools*

# Locust needs gevent, which stays out of the server's image.
FROM bare AS load
ENV PATH=/opt/kvasir/bin:$PATH PYTHONPATH=/opt/kvasir/app PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 MPLCONFIGDIR=/tmp
WORKDIR /opt/kvasir/app
COPY --from=packages-load /opt/kvasir /opt/kvasir
COPY kvasir/__init__.py ./kvasir/
COPY loadtest ./kvasir/loadtest
USER 10001:10001
ENTRYPOINT ["locust", "-f", "kvasir/loadtest/locust/locustfile.py"]
LABEL org.opencontainers.image.title=kvasir-load \
    org.opencontainers.image.description="Load-test an OpenAI-compatible server with Locust" \
    org.opencontainers.image.licenses=Apache-2.0

FROM bare AS runtime
ENV PATH=/opt/kvasir/bin:$PATH PYTHONPATH=/opt/kvasir/app PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    KVASIR_HOST=:: KVASIR_MODEL=/models/example ORT_DISABLE_TELEMETRY=1
WORKDIR /opt/kvasir/app
COPY examples/stdlib /models/example
COPY kvasir/__init__.py kvasir/__main__.py kvasir/py.typed ./kvasir/
COPY commands ./kvasir/commands
COPY integrations ./kvasir/integrations
COPY kernels/*.py kernels/self_test.onnx ./kvasir/kernels/
COPY model ./kvasir/model
COPY server ./kvasir/server
RUN python3 -m compileall -q .
EXPOSE 8000
STOPSIGNAL SIGTERM
USER 10001:10001
ENTRYPOINT ["kvasir"]
CMD ["serve"]
LABEL org.opencontainers.image.title=kvasir \
    org.opencontainers.image.description="Serve exported ONNX models with continuous batching" \
    org.opencontainers.image.licenses=Apache-2.0

FROM runtime AS cuda
COPY --from=packages-cuda /opt/kvasir /opt/kvasir

FROM runtime AS cpu
COPY --from=packages-cpu /opt/kvasir /opt/kvasir
COPY --from=library /built/kvasir/kernels/libkvasir.so ./kvasir/kernels/
