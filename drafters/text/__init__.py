"""Drafts copied from text, without weights.

Files in reading order:
- `answers`: stored answers of the target, as a table
- `suffix`: suffix decoding, and its index of texts
- `text_first`: suffix decoding in front of a trained draft

Other chapters import `answers`, `suffix` and `text_first`.
"""
