"""Drafters of a whole block of tokens in one pass.

Files in reading order:
- `shape`: options and configuration
- `tables`: embeddings and heads of a draft's own
- `layer_passes`: layers that see differently
- `fused_blocks`: training: attention of blocks of slots over long texts on a CPU
- `dense_blocks`: training: the same over short texts
- `block_unroll`: training: attention of blocks of slots
- `block_drafting`: drafting of blocks
- `dflash`: DFlash
- `dspark`: DSpark

Other chapters import families through `drafters/registry.py`.
"""
