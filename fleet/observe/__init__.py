"""`draftsmith observe`: a reverse proxy in front of any OpenAI-compatible server, which records
its traffic.

Files in reading order:
- `config`: options
- `command`: the command
- `proxy`: requests handed on and answers handed back, byte by byte
- `exchange`: one request and its answer, the choice of those that are recorded, counts
- `endpoints`: endpoints whose traffic is read, and answers from their bytes
- `rounds`: tokens, sampling and round records of an answer
- `recorder`: the thread that makes records
- `enrich`: fields added to a request, and their removal from the answer
- `probe`: proof that the removal is exact

Other chapters import none of it but `rounds`.
"""
