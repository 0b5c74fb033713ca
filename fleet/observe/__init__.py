"""`draftsmith observe`: a reverse proxy in front of any OpenAI-compatible server, which records
its traffic.

Files in reading order:
- `command`: the command
- `proxy`: requests handed on and answers handed back, byte by byte
- `exchange`: one request and its answer, the choice of those that are recorded, counts, and the
  thread that makes records
- `endpoints`: endpoints whose traffic is read, and answers from their bytes
- `rounds`: tokens, sampling and round records of an answer

Other chapters import none of it but `rounds`.
"""
