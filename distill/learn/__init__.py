"""Training on served text.

Files in reading order:
- `learner`: the learner
- `teachers`: distributions to match, of the running target or of records
- `optimizer`: gradient and step
- `adapters`: low-rank candidates
- `target_source`: the target, whose weights may change meanwhile
- `target_outline`: the target without weights

Other chapters import `learner`, `teachers`, `target_source` and `target_outline`.
"""
