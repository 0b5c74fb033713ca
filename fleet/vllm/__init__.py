"""Plugin in the processes of an unmodified vLLM, by its own entry points.

Files in reading order:
- `plugin`: entry points `register` and `endpoints`, probes, the recorder put into a worker
- `settings`: settings from `--additional-config`, and the plugin's state in one worker
- `faults`: warning of an engine that is not lossless, and a right kernel for CPUs
- `worker`: methods for `collective_rpc`
- `swap_client`: a swap of all workers of an engine
- `figures`: figures of all recorders as one engine's, and when it gives a version up by itself
- `follower`: keeps the engine on the version that the store gives it
- `endpoint`: routes below `/draftsmith`, and what is started beside an engine

No other chapter imports it.
"""
