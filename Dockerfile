# syntax=docker/dockerfile:1
# ltx-runner on a ROCm PyTorch image, for MI300X (gfx942) and MI350X (gfx950); on CUDA by build arguments alone.
# How to build and run it: docs/docker.md. It has not been built yet: there was no container engine to do it with.

# torch 2.12.0+rocm7.14.0, Python 3.12. The tag may move, the digest does not; an empty BASE_DIGEST takes the tag.
ARG BASE_IMAGE=docker.io/rocm/pytorch:rocm7.14_ubuntu24.04_py3.12_pytorch_release_2.12.0
ARG BASE_DIGEST=sha256:c38eeda81d85f00fbe35d3d50ce42ce59c524e87d810624f4eb5c52fddb3b9ad

FROM ${BASE_IMAGE}${BASE_DIGEST:+@${BASE_DIGEST}} AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The image's Python may be the distribution's, which asks for the second.
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# What the image brings and nobody may replace: torch, triton and their companions, at their versions.
COPY docker/image_packages.py /opt/image/
RUN python3 /opt/image/image_packages.py write /opt/image/constraints.txt
ENV PIP_CONSTRAINT=/opt/image/constraints.txt

FROM base AS aiter
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG AITER_REPO=https://github.com/ROCm/aiter.git
# A commit of pull request 5230, which brought na3d_flash; `refs/pull/5230/head` or a branch works too. Empty: no AITER.
ARG AITER_COMMIT=028f9cad8721696bdeab2b3311b43f8ad0816e70
ARG AITER_ARCHS=gfx942;gfx950
# Which HIP kernels are compiled now, by AITER's setup.py: 3 is the forward of its dense attention. What is left out is
# compiled on its first use. na3d_flash is Triton and always is.
ARG AITER_PREBUILD_KERNELS=3
ARG MAX_JOBS
WORKDIR /src/aiter
# AITER's setup.py replaces the image's triton unless it is told to keep it.
RUN mkdir -p /wheels && if [ -n "${AITER_COMMIT}" ]; then \
        git init -q . && git remote add origin "${AITER_REPO}" \
        && git fetch -q --depth 1 origin "${AITER_COMMIT}" && git checkout -q FETCH_HEAD \
        && grep -q "def na3d_flash_attn" aiter/ops/triton/attention/na3d_flash.py \
        && git submodule update --init --recursive --depth 1 \
        && python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
            > /tmp/build.txt \
        && python3 -m pip install -r /tmp/build.txt -r requirements.txt \
        && AITER_USE_SYSTEM_TRITON=1 GPU_ARCHS="${AITER_ARCHS}" PREBUILD_KERNELS="${AITER_PREBUILD_KERNELS}" \
            python3 -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . ; \
    fi

FROM base AS runner
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG EXTRAS=xfuser
ARG UID=1000
# `git describe --always --dirty`, for the json of every run; .git is not copied.
ARG COMMIT
COPY --from=aiter /wheels /tmp/wheels
WORKDIR /opt/ltx-runner
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY layers layers
COPY runner_models runner_models
COPY runner runner
# The check ends the build where torch or triton is another than the image's, or the two no longer import together.
# hadolint ignore=DL3013 # the ranges are pyproject.toml's
RUN find /tmp/wheels -name "*.whl" -print0 | xargs -0 python3 -m pip install ".${EXTRAS:+[${EXTRAS}]}" \
    && python3 /opt/image/image_packages.py check /opt/image/constraints.txt \
    && rm -rf /tmp/wheels

# Not root. AITER compiles what it lacks beside its own files; the caches are one volume.
COPY --chmod=0755 docker/entrypoint.sh /usr/local/bin/ltx-runner
RUN useradd --create-home --non-unique --uid "${UID}" runner \
    && mkdir -p /cache /output \
    && chown runner: /cache /output \
    && python3 /opt/image/image_packages.py folder aiter/jit | xargs --no-run-if-empty chown -R runner:
ENV HF_HOME=/cache/huggingface XDG_CACHE_HOME=/cache TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton PYTHONUNBUFFERED=1 HOME=/home/runner LTX_RUNNER_COMMIT=${COMMIT}
# The hub's token is no part of the image: HF_TOKEN of `docker run`, or this file.
# hadolint ignore=DL3064 # a path
ENV HF_TOKEN_PATH=/run/secrets/hf_token
USER ${UID}
WORKDIR /output
VOLUME ["/cache"]

# Whether requests can be made, asked with the tiny model: the memory may be in use by a request that is being made. One
# attention is tried: AITER's others would be compiled for it.
HEALTHCHECK --interval=10m --timeout=2m --start-period=2m --retries=2 \
    CMD ["python3", "-m", "runner", "--doctor", "--model", "tiny", "--height", "256", "--width", "256", \
         "--num_frames", "17", "--attention_backend", "SDPA"]

# [--nproc_per_node=N] FLAGS: torchrun ... -m runner FLAGS; anything that is no flag is run instead.
ENTRYPOINT ["/usr/local/bin/ltx-runner"]
CMD ["--help"]
