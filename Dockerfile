# Paceline with its examples, run by a user without privileges.
#
#   docker build -t paceline .                            # torch for CPUs, the smallest
#   docker build --build-arg TORCH=cu130 -t paceline .    # torch for NVIDIA GPUs with CUDA 13.0
#   docker run --rm --shm-size 2g paceline run --workers 2 examples/digits.py
#
# TORCH is one of the builds of torch that `uv pip install --torch-backend` knows: cpu, cu126, cu130, rocm7.2 ...
# --shm-size: workers of one host exchange gradients through shared memory, of which a container has 64 MB by default.
FROM python:3.12-slim AS base
ARG TORCH=cpu
RUN useradd --uid 1000 --create-home trainer
WORKDIR /home/trainer
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --torch-backend "$TORCH" ".[examples,text,notebook]" \
    && pip uninstall --yes uv

# What `make lint` and `make test` need, for the development container.
FROM base AS dev
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git iproute2 make \
    && rm -rf /var/lib/apt/lists/*
USER trainer

# The user by number: Kubernetes can then check that it is not root.
FROM base AS run
COPY --chown=1000:1000 examples examples
USER 1000
ENTRYPOINT ["paceline"]
CMD ["--help"]
