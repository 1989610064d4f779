# One image for CPUs, GPUs or TPUs, with the project in /moe_jax:
#   docker build --build-arg EXTRAS=plots -t moe_jax .                 CPUs
#   docker build --build-arg EXTRAS=cuda,plots -t moe_jax .            GPUs; run with --gpus all
#   docker build --build-arg EXTRAS=tpu,plots -t moe_jax .             TPUs; scripts/gke.yaml
#   docker run --rm -v "$PWD/runs:/moe_jax/runs" moe_jax --config configs/shakespeare_cpu.yaml [section.key=value …]
# Processes run as user 1000, who must be able to write to what is mounted. No secret is needed, or in the image.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG EXTRAS=plots

RUN useradd --uid 1000 --create-home trainer
WORKDIR /moe_jax
COPY pyproject.toml README.md LICENSE ./
COPY moe_jax moe_jax
RUN pip install --no-cache-dir --editable ".[${EXTRAS}]"
COPY configs configs
COPY scripts scripts
RUN mkdir runs && chown trainer runs

USER trainer
ENTRYPOINT ["python", "-m", "moe_jax.train"]
CMD ["--help"]
