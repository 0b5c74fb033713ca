"""Products of rows with a linear layer's weights on a CPU with a C++ compiler.

Files in reading order:
- `readings`: how kernels read weights, by measurement
- `few_rows`: weights laid out for a few rows and read once, `few_rows_cpu.cpp`
- `int8_rows`: the same with weights of 8 bits, `int8_rows_cpu.cpp`
- `float32_products`: linear layers of training in float32, forward and backward

Other chapters import all of these.
"""
