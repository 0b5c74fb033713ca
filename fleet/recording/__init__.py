"""Steps of a vLLM worker as records, by messages to a writer process beside it.

Files in reading order:
- `seam`: calls of the rejection sampler
- `recorder`: wrappers of one worker's calls, and the requests that are recorded
- `messages`: kinds of messages and their arrays, and the writer from the engine's side
- `writer`: the writer process, `python -m draftsmith.fleet.recording.writer`: requests from
  messages to records, and figures

`messages` runs inside an engine and imports nothing of draftsmith outside `fleet` but `shared_ring`
and `child_process`; `writer` runs in the writer process alone. `vllm` imports `recorder`, `seam`
and `messages`.
"""
