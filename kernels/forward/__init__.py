"""Steps between the products of a layer: norms, gates, rotations. Each is one call of a compiled
kernel on a CPU, one launch on a GPU, and rounds to the dtype where the several operations do.

Files in reading order:
- `row_steps`: the C++ kernels, `row_steps_cpu.cpp`
- `norm_triton`: RMS norms, with the residual sum before them
- `gate_triton`: an activation times what it lets through
- `rotation_triton`: rotary embeddings, with the norms before them and the write to a paged pool

Other chapters import all of these; those in Triton only where `dispatch.choose` says "triton".
"""
