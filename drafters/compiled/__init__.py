"""Forward passes captured once on a CPU and replayed with fewer operations.

Files in reading order:
- `capture`: a forward as a graph of tensor operations
- `rewrite`: rewriting that keeps the numbers
- `packed_linear`: linear layers of one input as one
- `kernel_steps`: the kernel calls of a rewritten graph
- `before`: what comes before the first kernel
- `one_call`: these as one call, for few tokens
- `replay`: the rewritten graph as a function
- `captured`: the parts of a causal LM, checked against the model

Other chapters import `captured` and `replay`.
"""
