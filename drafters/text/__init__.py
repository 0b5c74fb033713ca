"""Drafts copied from text, without weights.

Files in reading order:
- `ngram`: the text after the last n-gram
- `answers`: stored answers of the target, as a table
- `suffix`: suffix decoding, and its index of texts
- `text_first`: suffix decoding in front of a trained draft

Other chapters import `ngram`, `answers`, `suffix` and `text_first`.
"""
