"""Drafts that a server holds.

Files in reading order:
- `served`: one draft and its failures
- `routing`: draft by request
- `swap`: new weights
- `lineup`: drafts added, swapped, retired

Other chapters import `lineup`, `served` and `swap`.
"""
