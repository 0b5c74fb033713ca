"""Wire from an engine's thread to a writer process beside it.

Files in reading order:
- `messages`: kinds of messages and their arrays
- `child`: the writer from the engine's side
- `requests`: text and rounds of running requests, from messages to records
- `positions`: logged distributions of the positions of a step
- `served`: alpha, tau and losslessness by version
- `writer`: the writer process, `python -m draftsmith.fleet.wire.writer`

`messages` and `child` run inside an engine and import nothing of draftsmith outside `fleet` but the
chapter `shared_memory`; the others run in the writer alone.
"""
