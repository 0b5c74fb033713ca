"""Products of rows with a linear layer's weights on a CPU with a C++ compiler, and the steps
between a layer's products: norms, gates, rotations.

Files in reading order:
- `readings`: how kernels read weights, by measurement
- `few_rows`: weights laid out for a few rows and read once, `few_rows_cpu.cpp`
- `narrow_products`: many rows of narrow types by float32 arithmetic
- `fast_types`: types that this processor multiplies faster than float32
- `row_steps`: steps between products by C++ kernels, `row_steps_cpu.cpp`
- `row_steps_triton`: the same in Triton

Other chapters import all of these; `row_steps_triton` only where `dispatch.choose` says "triton".
"""
