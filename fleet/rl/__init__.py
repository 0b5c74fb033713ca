"""Draft that follows a policy in training by TRL or any other trainer of transformers' kind.

Files in reading order:
- `rollouts`: completions of a trainer as records, where no engine makes them
- `handover`: names of the weights, and the newest draft version, for an engine that rolls out
- `callback`: `FollowPolicy`, the trainer's callback, and the policy's weights on disk

No other chapter imports it.
"""
