"""Attention over a paged pool of keys and values: the reference in torch, a Triton kernel, and one
in C++ for short rows on a CPU.

Files in reading order:
- `window`: how far back the queries of a layer look
- `pool`: the pool, and the layout of one pass over it
- `repeated_numbers`: tensors that are the same in most passes
- `paged`: the interface: ragged batches, chains and trees
- `masked_values`: masked values that are not finite
- `paged_torch`: the reference
- `paged_compiled`: the C++ kernel, `paged_cpu.cpp`
- `tiles`: sizes of the Triton kernel's tiles, by registers and shared memory
- `paged_triton`: the Triton kernel
- `paged_flash`: FlashAttention-3, where it is installed

Other chapters import `paged`, `pool`, `repeated_numbers` and `window`.
"""
