"""Drafters of a whole block of tokens in one pass.

Files in reading order:
- `shape`: options, configuration, embeddings and heads of a draft's own
- `block_unroll`: training: attention of blocks of slots
- `dflash`: DFlash
- `dspark`: DSpark

Other chapters import families through `drafters/registry.py`.
"""
