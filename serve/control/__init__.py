"""Number of tokens to draft.

Files in reading order:
- `control`: fixed, by batch size, or measured
- `estimates`: time of a round by k, and survival of drafts by class
- `auto`: k, or trees, by measured throughput
- `draft_temperature`: temperature of drafting

Other chapters import `control`.
"""
