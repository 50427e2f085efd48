# syntax=docker/dockerfile:1
#
# Octavo as an image, for CPUs or for NVIDIA GPUs:
#
#   docker build --target cpu  --tag octavo:cpu  .
#   docker build --target cuda --tag octavo:cuda .
#
# How to run it: docs/deployment.md. No model, key or configuration is inside.

# ---- dependencies: built again only when their lists change --------------------------------------

FROM python:3.12-slim-bookworm AS dependencies
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH
COPY pyproject.toml constraints.txt ./
COPY deploy/requirements.py deploy/

FROM dependencies AS dependencies-cpu
RUN python deploy/requirements.py --extra grammar > requirements.txt \
 && python deploy/requirements.py --torch +cpu > torch.txt \
 && pip install --constraint constraints.txt --requirement requirements.txt --requirement torch.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu

FROM dependencies AS dependencies-cuda
RUN python deploy/requirements.py --extra grammar --extra triton > requirements.txt \
 && pip install --constraint constraints.txt --requirement requirements.txt

# ---- octavo itself -------------------------------------------------------------------------------

FROM dependencies AS wheel
# hadolint ignore=DL3013
RUN pip install build setuptools
COPY setup.py README.md LICENSE ./
COPY core core
COPY kernels kernels
COPY engine engine
COPY frontend frontend
COPY testing testing
COPY plugins plugins
COPY backends backends
COPY models models
COPY server server
COPY bench bench
RUN python -m build --wheel --no-isolation --outdir /wheel

FROM dependencies-cpu AS installed-cpu
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel pip install --no-deps /wheel/*.whl

FROM dependencies-cuda AS installed-cuda
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel pip install --no-deps /wheel/*.whl

# ---- what runs -----------------------------------------------------------------------------------
# A C compiler is part of it: native kernels are compiled for the machine that they run on, at the
# first start, and kept in OCTAVO_CACHE_DIR; triton needs one too.

FROM python:3.12-slim-bookworm AS runtime
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10001 --user-group --home-dir /var/cache/octavo --create-home octavo
ENV PATH=/opt/octavo/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OCTAVO_CACHE_DIR=/var/cache/octavo \
    HF_HOME=/var/cache/octavo/huggingface
USER 10001
WORKDIR /var/cache/octavo
VOLUME /var/cache/octavo
EXPOSE 8000
# SIGTERM lets running requests finish: stop with `docker stop --time 50`, see docs/deployment.md.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["octavo"]
CMD ["serve", "--config", "/etc/octavo/config.yaml", "--host", "0.0.0.0"]

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=installed-cuda /opt/octavo /opt/octavo

FROM runtime AS cpu
COPY --from=installed-cpu /opt/octavo /opt/octavo
