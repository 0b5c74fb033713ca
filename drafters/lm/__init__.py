"""Draft language models.

Files in reading order:
- `draft_lm`: a causal LM over the target's token ids, or one cut out of its target
- `lora`: low-rank adapters on one
- `foreign_lm`: one with another tokenizer

Other chapters import families through `drafters/registry.py`.
"""
