"""Attention over a paged pool of keys and values: the reference in torch, a Triton kernel, and one
in C++ for short rows on a CPU.

Files in reading order:
- `pool`: the pool, the layout of one pass over it, how far back the queries of a layer look
- `paged`: the interface: ragged batches, chains and trees
- `paged_torch`: the reference
- `paged_compiled`: the C++ kernel, `paged_cpu.cpp`
- `tiles`: sizes of the Triton kernel's tiles, by registers and shared memory
- `lay_out_triton`: layout of a pass in one launch
- `paged_triton`: the Triton kernel

Other chapters import `paged` and `pool`.
"""
