"""LoRA adapters of a target, applied token by token, so that requests of several share a pass.

Files in reading order:
- `names`: names and folders of adapters in options
- `deltas`: low-rank changes of linear layers at some tokens of a pass
- `adapters`: adapters of a target, read by peft and checked against it

Other chapters import `names` and `adapters`.
"""
