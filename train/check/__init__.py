"""`draftsmith doctor`: faults of a target, draft, data or running server, found before they cost
time; and `draftsmith plan`: the costs of a training.

Files in reading order:
- `finding`: results
- `doctor`: the command, and the order of its checks
- `models`: the target and the draft
- `data`: the data and its distributions
- `memory`: memory needed
- `server`: a running server
- `plan`: one timed step of each draft

Other chapters import `doctor` and `plan`.
"""
