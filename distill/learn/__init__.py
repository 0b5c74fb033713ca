"""Training on served text.

Files in reading order:
- `learner`: the learner, its gradient and step
- `teachers`: distributions to match, of the running target or of records
- `text_states`: the target, whose weights may change meanwhile, and its hidden states by text
"""
