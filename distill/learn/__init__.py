"""Training on served text.

Files in reading order:
- `learner`: the learner
- `optimizer`: gradient and step
- `adapters`: low-rank candidates

Other chapters import `learner`.
"""
