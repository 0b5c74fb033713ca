"""Training on served text.

Files in reading order:
- `learner`: the learner
- `rehearsal`: texts of the data that a draft was trained on
- `teachers`: distributions to match, of the running target or of records
- `text_states`: hidden states of the target, each text read once
- `processes`: several devices, which read texts and train
- `optimizer`: gradient and step
- `draft_shares`: the same by several processes, each with its part
- `spread_optimizer`: the first process's side of it, and the others'
- `adapters`: low-rank candidates
- `target_source`: the target, whose weights may change meanwhile

Other chapters import `learner`, `processes`, `rehearsal`, `teachers`, `text_states` and
`target_source`.
"""
