# Paceline with its examples.
#
#   docker build -t paceline .
#   docker run --rm --shm-size 2g paceline run --workers 2 examples/digits.py
#
# --shm-size: workers of one host exchange gradients through shared memory, of which a container has 64 MB by default.
# The torch that pip finds by default brings CUDA, several gigabytes. For CPUs only, name PyTorch's index of CPU builds:
# docker build --build-arg PIP_EXTRA_INDEX_URL=... (the address is on pytorch.org under "Get started").
FROM python:3.12-slim AS base
ARG PIP_EXTRA_INDEX_URL=
RUN useradd --create-home trainer
WORKDIR /home/trainer
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir ".[examples,text,notebook]"

# What `make lint` and `make test` need, for the development container.
FROM base AS dev
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git iproute2 make \
    && rm -rf /var/lib/apt/lists/*
USER trainer

FROM base AS run
COPY --chown=trainer examples examples
USER trainer
ENTRYPOINT ["paceline"]
CMD ["--help"]
