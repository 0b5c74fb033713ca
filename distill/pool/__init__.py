"""Drafts of request classes.

Files in reading order:
- `policy`: when a class gets its own draft
- `clusters`: classes found in untagged traffic
- `pool`: the drafts

Other chapters import `pool`.
"""
