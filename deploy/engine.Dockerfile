# vLLM as it is, with draftsmith beside it. Nothing that vLLM pins is changed: --no-deps.
#   docker build -f deploy/engine.Dockerfile -t draftsmith-engine .
FROM vllm/vllm-openai:v0.32.0
COPY . /draftsmith
RUN uv pip install --system --no-deps /draftsmith && uv pip install --system pyarrow fsspec s3fs shtab tqdm
ENTRYPOINT ["vllm", "serve"]
