"""Training on served text.

Files in reading order:
- `learner`: the learner, and low-rank adapters
- `rehearsal`: texts of the data that a draft was trained on
- `teachers`: distributions to match, of the running target or of records
- `text_states`: hidden states of the target, each text read once
- `optimizer`: gradient and step
- `target_source`: the target, whose weights may change meanwhile

Other chapters import `learner`, `rehearsal`, `teachers`, `text_states` and `target_source`.
"""
