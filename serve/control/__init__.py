"""Number of tokens to draft.

Files in reading order:
- `control`: fixed or measured; temperature of drafting
- `estimates`: time of a round by k, and survival of drafts by class
- `auto`: k, or trees, by measured throughput

Other chapters import `control`.
"""
