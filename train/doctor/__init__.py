"""`draftsmith doctor`: faults of a target, draft, data or running server, found before they cost
time.

Files in reading order:
- `command`: the command
- `config`: its options
- `finding`: results
- `offline`: everything checked without a server
- `processes`: the processes of a launcher
- `target`: the target
- `draft`: the draft
- `data`: the data
- `data_tokens`: its tokens
- `distributions`: its distributions
- `memory`: memory needed
- `server`: a running server
- `load`: its load
- `drafting`: its drafts

Other chapters import `command`.
"""
