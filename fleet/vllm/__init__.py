"""Plugin in the processes of an unmodified vLLM, by its own entry points.

Files in reading order:
- `plugin`: entry points `register` and `endpoints`
- `settings`: settings from `--additional-config`
- `state`: the plugin's state in one worker
- `expand_kernel`: a right kernel for sampled speculation on CPUs
- `faults`: warning of an engine that is not lossless
- `attach`: capability probes, and the recorder put into a worker
- `worker`: methods for `collective_rpc`
- `swap_methods`: the method that moves a swap one step on
- `swap_client`: a swap of all workers of an engine
- `replicas`: figures of all recorders as one engine's
- `follower`: keeps the engine on the version that the store gives it
- `gauges`: gauges of the draft in vLLM's own registry
- `endpoint`: routes below `/draftsmith`, and what is started beside an engine

No other chapter imports it.
"""
