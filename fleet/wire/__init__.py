"""Wire from an engine's thread to a writer process beside it.

Files in reading order:
- `messages`: kinds of messages and their arrays, and the writer from the engine's side
- `requests`: text and rounds of running requests, from messages to records
- `writer`: the writer process, `python -m draftsmith.fleet.wire.writer`, and its figures

`messages` runs inside an engine and imports nothing of draftsmith outside `fleet` but the chapter
`shared_memory`; the others run in the writer alone.
"""
