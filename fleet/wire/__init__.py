"""Wire from an engine's thread to a writer process beside it.

Files in reading order:
- `ring`: bounded ring of messages in shared memory, and a status that flows back
- `messages`: kinds of messages and their arrays
- `child`: the engine's side: starts, watches and ends the writer
- `requests`: text and rounds of running requests, from messages to records
- `positions`: logged distributions of the positions of a step
- `served`: alpha, tau and losslessness by version
- `writer`: the writer process, `python -m draftsmith.fleet.wire.writer`

`ring`, `messages` and `child` run inside an engine and import nothing of draftsmith outside
`fleet`; the others run in the writer alone.
"""
