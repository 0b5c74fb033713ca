"""Sampling distributions of a request and the random numbers that draw from them.

Files in reading order:
- `filters`: temperature, top-k, top-p and min-p
- `random_streams`: counter-based random streams
- `random_streams_triton`: the same streams inside Triton kernels
- `filters_triton`: the filters of a row inside Triton kernels, without an order of its tokens
- `draw_triton`: filters and a draw in Triton
- `draw`: filters and a draw, by a compiled kernel or by torch
- `top_tokens`: sparse distributions: top tokens and the mass outside
- `logged`: the same as records hold them, of logits and of an engine's round
- `vocabulary`: draft logits over the target's vocabulary

Other chapters import `draw`, `filters`, `logged`, `random_streams`, `top_tokens` and `vocabulary`.
"""
