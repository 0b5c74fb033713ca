"""Drafts copied from text, without weights.

Files in reading order:
- `ngram`: the text after the last n-gram
- `suffix_index`: index of texts by suffix
- `suffix`: suffix decoding
- `text_first`: suffix decoding in front of a trained draft

Other chapters import `ngram`, `suffix` and `text_first`.
"""
