"""`draftsmith observe`: a reverse proxy in front of any OpenAI-compatible server, which records
its traffic.

Files in reading order:
- `config`: options
- `command`: the command
- `proxy`: requests handed on and answers handed back, byte by byte
- `exchange`: one request and its answer, and the choice of those that are recorded
- `endpoints`: endpoints whose traffic is read
- `answers`: an answer from its bytes
- `tokens`: tokens of a prompt and its answer
- `sampling`: sampling of a request
- `rounds`: round records of an answer
- `recorder`: the thread that makes records
- `counters`: counts of what was observed
- `enrich`: fields added to a request, and their removal from the answer
- `spans`: edits of JSON text in place
- `probe`: proof that the removal is exact

Other chapters import none of it.
"""
