"""Forward passes captured once and replayed with fewer operations: on a CPU with fewer calls, on a
GPU with fewer launches.

Files in reading order:
- `capture`: a forward as a graph of tensor operations
- `patterns`: what is looked for in a graph, and how it is replaced
- `packed_linear`: linear layers of one input as one, on a CPU
- `rewrite`: rewriting for a CPU that keeps the numbers
- `kernel_steps`: the kernel calls of a rewritten graph
- `one_call`: these as one call, for few tokens
- `device_rewrite`: rewriting for a GPU
- `captured`: the parts of a causal LM, checked against the model

Other chapters import `captured`.
"""
