# `draftsmith serve`, with its options behind the image's name.
#   docker build -f deploy/serve.Dockerfile -t draftsmith-serve .
FROM python:3.12-slim
# For a machine without a GPU: --build-arg PIP_EXTRA_INDEX_URL=, torch's index of CPU wheels.
ARG PIP_EXTRA_INDEX_URL
# Triton and the kernels for the CPU are compiled where they run.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /draftsmith
RUN pip install --no-cache-dir '/draftsmith[serve]'
ENTRYPOINT ["draftsmith", "serve", "--host", "0.0.0.0"]
