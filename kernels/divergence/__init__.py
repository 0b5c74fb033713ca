"""Divergences between draft and target distributions, with gradients in closed form.

Files in reading order:
- `kind`: names and parameters of the divergences; torch-free
- `rows`: the reference over rows of logits; on a CPU by `rows_cpu.cpp`
- `rows_triton`: the same in Triton
- `sparse`: divergence from stored top tokens
- `fused`: from hidden states, in chunks of rows

Other chapters import `kind`, `sparse` and `fused`.
"""
