"""Plugin in the processes of an unmodified vLLM, by its own entry points.

Files in reading order:
- `plugin`: entry points `register` and `endpoints`, probes, the recorder put into a worker, and
  warnings of engines that are not lossless
- `worker`: settings from `--additional-config`, and methods for `collective_rpc`
- `swap_client`: a swap of all workers of an engine
- `follower`: keeps the engine on the version that the store gives it, unless its figures are worse
- `endpoint`: routes below `/draftsmith`, and what is started beside an engine

No other chapter imports it.
"""
