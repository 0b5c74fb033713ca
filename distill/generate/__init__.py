"""`draftsmith generate`: a dataset of the target's answers.

Files in reading order:
- `command`: the command
- `prompts`: prompts, and temperature and thinking of each answer
- `writers`: writers of answers
- `answers`: the dataset folder, and several processes that write it
- `steps`: the target, its writer, the answers of some shards, hidden states, and the record
- `self_prompts`: prompts that the target writes

Other chapters import `command`.
"""
