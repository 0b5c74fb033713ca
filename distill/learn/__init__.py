"""Training on served text.

Files in reading order:
- `learner`: the learner
- `gradients`: the gradient of one step
- `optimizer`: the optimizer
- `adapters`: low-rank candidates
- `ranks`: several processes
- `shares`: rows by process
- `zero`: sharded optimizer

Other chapters import `learner`.
"""
