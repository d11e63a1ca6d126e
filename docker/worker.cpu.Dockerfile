# A worker that computes on the CPU.
#
#   docker build -f docker/worker.cpu.Dockerfile -t legato-worker-cpu .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# The pinned releases that this role needs. The layer lives until pyproject.toml or the pins change.
FROM ${PYTHON_IMAGE} AS packages
ENV PIP_CONSTRAINT=/build/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# On x86-64, PyPI's torch carries gigabytes of CUDA. PyTorch's own index has builds without it; name it here to have one:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... (docs/deploy.md)
ARG PIP_EXTRA_INDEX_URL
COPY pyproject.toml docker/constraints.txt ./
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies']['worker'], \
*project['optional-dependencies']['tracing'], sep='\n')" >requirements.txt \
    && python -m venv --system-site-packages --without-pip /opt/legato \
    && python -m pip --python /opt/legato/bin/python install --quiet -r requirements.txt

# Trimmed: torch's own tests and headers are a fifth of it, and nothing reads them at run time.
FROM packages AS trimmed
RUN cd /opt/legato/lib/python3.11/site-packages/torch \
    && rm -rf test include share/cmake bin/test_* bin/protoc* bin/*Test

# Our C++ kernels, built here for every instruction set that a machine may have, since the image has no compiler.
FROM ${PYTHON_IMAGE} AS kernels
RUN apt-get update -qq && apt-get install --yes -qq --no-install-recommends g++ >/dev/null && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY gpu_worker/__init__.py gpu_worker/
COPY gpu_worker/processor.py gpu_worker/
COPY gpu_worker/kernels gpu_worker/kernels/
ENV XDG_CACHE_HOME=/opt/legato/cache
RUN mkdir -p $XDG_CACHE_HOME && python -m gpu_worker.kernels.build --all

# Our own code: changes often, is small, and is the same layer in every role's image.
FROM ${PYTHON_IMAGE} AS code
ENV PIP_CONSTRAINT=/build/docker/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY . .
# System packages are the base image's pip, which `legato model pull` downloads with, and no more.
RUN python -m venv --system-site-packages --without-pip /opt/legato \
    && python -m pip --python /opt/legato/bin/python install --quiet --no-deps . \
    && install -m 644 docker/healthy.py /opt/legato/bin/healthy.py

FROM ${PYTHON_IMAGE}
# One user in all images, because they share volumes; the folders make a new volume that user's.
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin legato \
    && install -d -o legato -g legato /keys /models /var/lib/legato
COPY --from=trimmed /opt/legato /opt/legato
COPY --from=kernels /opt/legato/cache /opt/legato/cache
# The root file system may be read-only: what is written goes to a volume, or to a tmpfs at /tmp.
ENV PATH=/opt/legato/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME=/opt/legato/cache \
    LEGATO_ADMIN_HOST=0.0.0.0 \
    LEGATO_ADMIN_PORT=9100 \
    LEGATO_KEYS=/keys/ring.toml \
    LEGATO_MODELS=/models \
    LEGATO_SCHEDULER=tcp://scheduler:5600
USER legato
EXPOSE 9100
# Ready rather than live: `ps` shows it, and `up --wait` and a rolling upgrade wait for it. A platform that kills what is
# unhealthy must be given `healthy.py live` instead: no process of ours gets ready by being killed.
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=2 \
    CMD ["python", "-IS", "/opt/legato/bin/healthy.py"]
ENTRYPOINT ["legato", "worker"]
COPY --from=code /opt/legato/lib/ /opt/legato/lib/
COPY --from=code /opt/legato/bin/legato /opt/legato/bin/healthy.py /opt/legato/bin/
