"""Training on served text.

Files in reading order:
- `learner`: the learner
- `optimizer`: gradient and step
- `adapters`: low-rank candidates
- `target_source`: the target, whose weights may change meanwhile

Other chapters import `learner` and `target_source`.
"""
