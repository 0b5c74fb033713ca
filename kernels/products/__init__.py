"""Products of rows with a linear layer's weights on a CPU with a C++ compiler.

Files in reading order:
- `readings`: how kernels read weights, by measurement
- `few_rows`: weights laid out for a few rows and read once, `few_rows_cpu.cpp`
- `int8_rows`: the same with weights of 8 bits, `int8_rows_cpu.cpp`
- `wide_products`: many rows of a narrow type by float32 arithmetic, where that is faster
- `float32_products`: linear layers of training in float32, forward and backward
- `fast_types`: types that this processor multiplies faster than float32

Other chapters import all of these.
"""
