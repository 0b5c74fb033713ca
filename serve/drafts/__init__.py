"""Drafts that a server holds.

Files in reading order:
- `served`: one draft and its failures
- `swap`: new weights
- `draft_set`: drafts added, swapped, retired; the draft of a request

Other chapters import `draft_set`, `served` and `swap`.
"""
