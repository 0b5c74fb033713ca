"""`draftsmith plan`: which draft to train, with expected cost and speed.

Files in reading order:
- `command`: the command
- `config`: its options
- `candidates`: drafts considered
- `costs`: cost of a run
- `timing`: time of a round on this machine
- `expected`: expected acceptance
- `forecast`: expected speed
- `trees`: expected speed of draft trees
- `text`: numbers and rows as text
- `offloaded`: training beside an offloaded target
- `make`: the plan
- `report`: JSON and text
- `curve_fit`: a saturating power curve through figures over amounts of data
- `data_curve`: drafts trained on parts of the data, and what more would give

Other chapters import `command`.
"""
