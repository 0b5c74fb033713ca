# The learner and the publisher, in an environment of their own.
#   docker build -f deploy/learner.Dockerfile -t draftsmith-learner .
FROM python:3.12-slim
# Triton and the kernels for the CPU are compiled where they run.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /draftsmith
RUN pip install --no-cache-dir '/draftsmith[train,fleet]' s3fs
ENTRYPOINT ["draftsmith"]
