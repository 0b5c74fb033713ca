"""Divergences between draft and target distributions, with gradients in closed form.

Files in reading order:
- `kind`: names and parameters of the divergences; torch-free
- `rows`: the reference over rows of logits
- `rows_compiled`: the same by a compiled kernel of a CPU
- `rows_triton`: the same in Triton
- `sparse`: divergence from stored top tokens
- `fused`: from hidden states, in chunks of rows

Other chapters import `kind`, `sparse` and `fused`.
"""
