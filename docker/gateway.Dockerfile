# The gateway: HTTP on one side, tokenizers on the other. No torch, no model.
#
#   docker build -f docker/gateway.Dockerfile -t legato-gateway .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# The pinned releases that this role needs. The layer lives until pyproject.toml or the pins change.
FROM ${PYTHON_IMAGE} AS packages
ENV PIP_CONSTRAINT=/build/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY pyproject.toml docker/constraints.txt ./
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies']['gateway'], \
*project['optional-dependencies']['tracing'], sep='\n')" >requirements.txt \
    && python -m venv --system-site-packages --without-pip /opt/legato \
    && python -m pip --python /opt/legato/bin/python install --quiet -r requirements.txt

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
COPY --from=packages /opt/legato /opt/legato
# The root file system may be read-only: what is written goes to a volume, or to a tmpfs at /tmp.
ENV PATH=/opt/legato/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 \
    LEGATO_ADMIN_HOST=0.0.0.0 \
    LEGATO_ADMIN_PORT=9100 \
    LEGATO_KEYS=/keys/ring.toml \
    LEGATO_HOST=0.0.0.0 \
    LEGATO_PORT=8000 \
    LEGATO_TOKENIZERS=tcp://tokenizer:5600
USER legato
EXPOSE 8000 9100
# Ready rather than live: `ps` shows it, and `up --wait` and a rolling upgrade wait for it. A platform that kills what is
# unhealthy must be given `healthy.py live` instead: no process of ours gets ready by being killed.
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=2 \
    CMD ["python", "-IS", "/opt/legato/bin/healthy.py"]
ENTRYPOINT ["legato", "gateway"]
COPY --from=code /opt/legato/lib/ /opt/legato/lib/
COPY --from=code /opt/legato/bin/legato /opt/legato/bin/healthy.py /opt/legato/bin/
