# A worker that computes on NVIDIA GPUs. Its build compiles flash-attn: an hour on many cores, and 4 GiB of memory for each job.
#
#   docker build -f docker/worker.cuda.Dockerfile -t legato-worker-cuda --build-arg MAX_JOBS=8 .
#
# CUDA's major version is that of the pinned torch's own libraries. Python is Ubuntu's, 3.12, in both stages.
ARG CUDA_VERSION=13.0.0
ARG SYSTEM=ubuntu24.04

FROM nvidia/cuda:${CUDA_VERSION}-devel-${SYSTEM} AS packages
ENV PIP_CONSTRAINT=/build/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update -qq && apt-get install --yes -qq --no-install-recommends python3-dev python3-venv git >/dev/null \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY pyproject.toml docker/constraints.txt ./
RUN python3 -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies']['worker'], \
*project['optional-dependencies']['tracing'], sep='\n')" >requirements.txt \
    && python3 -m venv /opt/legato \
    && /opt/legato/bin/pip install --quiet -r requirements.txt
# flash-attn is built against the torch that is there, for Ampere and Hopper.
ARG MAX_JOBS=4
ARG FLASH_ATTN_CUDA_ARCHS="80;90"
RUN /opt/legato/bin/pip install --quiet ninja psutil wheel \
    && /opt/legato/bin/pip install --quiet --no-build-isolation "$(python3 -c "import tomllib; \
print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['cuda'])")"

# Our own code: changes often, and is small.
FROM nvidia/cuda:${CUDA_VERSION}-devel-${SYSTEM} AS code
ENV PIP_CONSTRAINT=/build/docker/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update -qq && apt-get install --yes -qq --no-install-recommends python3-venv >/dev/null
WORKDIR /build
COPY . .
RUN python3 -m venv /opt/legato \
    && /opt/legato/bin/pip install --quiet --no-deps . \
    && /opt/legato/bin/pip uninstall --quiet --yes pip \
    && install -m 644 docker/healthy.py /opt/legato/bin/healthy.py

# torch brings CUDA's libraries along, so the smallest base will do; Triton compiles its launchers with gcc.
FROM nvidia/cuda:${CUDA_VERSION}-base-${SYSTEM}
RUN apt-get update -qq && apt-get install --yes -qq --no-install-recommends gcc libc6-dev python3-dev >/dev/null \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin legato \
    && install -d -o legato -g legato /keys /models /var/lib/legato
COPY --from=packages /opt/legato /opt/legato
# The root file system may be read-only: what is written goes to a volume, or to a tmpfs at /tmp that allows execution,
# where Triton keeps what it compiles.
ENV PATH=/opt/legato/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LEGATO_ADMIN_HOST=0.0.0.0 \
    LEGATO_ADMIN_PORT=9100 \
    LEGATO_KEYS=/keys/ring.toml \
    LEGATO_MODELS=/models \
    LEGATO_SCHEDULER=tcp://scheduler:5600 \
    LEGATO_DEVICE=cuda
USER legato
EXPOSE 9100
# See worker.cpu.Dockerfile; loading a large model and capturing graphs takes minutes.
HEALTHCHECK --interval=5s --timeout=3s --start-period=600s --retries=2 \
    CMD ["python", "-IS", "/opt/legato/bin/healthy.py"]
ENTRYPOINT ["legato", "worker"]
COPY --from=code /opt/legato/lib/ /opt/legato/lib/
COPY --from=code /opt/legato/bin/legato /opt/legato/bin/healthy.py /opt/legato/bin/
