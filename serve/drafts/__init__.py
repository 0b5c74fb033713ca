"""Drafts that a server holds.

Files in reading order:
- `served`: one draft and its failures
- `routing`: draft by request
- `swap`: new weights
- `draft_set`: drafts added, swapped, retired

Other chapters import `draft_set`, `served` and `swap`.
"""
