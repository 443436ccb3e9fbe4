# flowalign for GPUs, or with --build-arg BASE=cpu for machines without.
#   docker build -t flowalign .
#   docker run --gpus all --shm-size 16g -v "$PWD/runs:/work/runs" -v hub:/hub flowalign train configs/sd3/flow_grpo.yaml
#   docker build -t flowalign:cpu --build-arg BASE=cpu . && docker run flowalign:cpu demo
# `docker stop` sends SIGTERM: the run saves a checkpoint and leaves with code 75, for which schedulers start it again
# with --resume. Give it time: docker stop --timeout 600.
ARG BASE=cuda

FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS base-cuda
# torch from PyPI brings its own CUDA libraries
ENV PIP_EXTRA_INDEX_URL=""

FROM ubuntu:24.04 AS base-cpu
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

FROM base-${BASE} AS flowalign
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv build-essential python3-dev \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH HF_HOME=/hub OMP_WAIT_POLICY=PASSIVE PYTHONUNBUFFERED=1
WORKDIR /work
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY samplers samplers
COPY rewards rewards
COPY flowalign flowalign
COPY configs configs
COPY scripts scripts
RUN pip install --no-cache-dir -e . -c constraints.txt
# the process itself gets the signals, no shell before it
ENTRYPOINT ["flowalign"]
CMD ["--help"]
