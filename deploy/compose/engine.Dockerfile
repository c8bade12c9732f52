# vLLM with the connector. Build context: the root of the repository.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
FROM ${VLLM_IMAGE}
COPY locks/core.txt /src/locks/core.txt
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
# The engine's own packages stay as they are: only what the connector needs besides is added.
RUN pip install --no-cache-dir msgspec xxhash prometheus-client && pip install --no-cache-dir --no-deps /src
