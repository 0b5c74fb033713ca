"""`draftsmith generate`: a dataset of the target's answers.

Files in reading order:
- `command`: the command
- `processes`: several processes that write one dataset
- `ways`: temperature and thinking of each answer
- `prompts`: prompts
- `writers`: writers of answers
- `answers`: the dataset folder
- `steps`: the target, its writer, the answers of some shards, and the record
- `self_prompts`: prompts that the target writes
- `stored_states`: stored hidden states

Other chapters import `command`.
"""
