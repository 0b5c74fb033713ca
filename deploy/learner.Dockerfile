# The learner and the publisher, in an environment of their own.
#   docker build -f deploy/learner.Dockerfile -t draftsmith-learner .
FROM python:3.12-slim
COPY . /draftsmith
RUN pip install --no-cache-dir '/draftsmith[train,fleet]' s3fs
ENTRYPOINT ["draftsmith"]
