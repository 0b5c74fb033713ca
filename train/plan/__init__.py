"""`draftsmith plan`: which draft to train, with expected cost and speed.

Files in reading order:
- `command`: the command
- `config`: its options
- `candidates`: drafts considered
- `costs`: cost of a run
- `timing`: time of a round on this machine
- `expected`: expected acceptance
- `forecast`: expected speed
- `make`: the plan
- `report`: JSON and text

Other chapters import `command`.
"""
