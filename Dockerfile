# The project on an NGC PyTorch image. UNTRIED: no machine with Docker and a GPU was at hand.
#
#   docker build --build-arg BASE=IMAGE -t megatron-rl .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD/runs:/workspace/runs" -it megatron-rl
#
# IMAGE is an NGC PyTorch image with Python 3.12 and torch 2.11 or later. Its torch, CUDA, NCCL, Triton, flash-attn and
# Transformer Engine are kept.
ARG BASE
FROM ${BASE}

RUN useradd --create-home trainer && mkdir /workspace/megatron-rl && chown -R trainer /workspace
USER trainer
WORKDIR /workspace/megatron-rl
COPY --chown=trainer . .

# Into .venv, over the image's own packages: TORCH="" leaves torch as it is.
RUN TORCH="" VENV_FLAGS=--system-site-packages bash tools/setup.sh
ENV PATH=/workspace/megatron-rl/.venv/bin:$PATH

CMD ["bash"]
