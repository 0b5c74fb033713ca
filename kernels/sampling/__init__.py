"""Sampling distributions of a request and the random numbers that draw from them.

Files in reading order:
- `filters`: temperature, top-k, top-p and min-p
- `random_streams`: counter-based random streams
- `noise_compiled`: the noise of a whole vocabulary by a compiled kernel
- `draw_compiled`: filters and a draw in one call, by a compiled kernel
- `random_streams_triton`: the same streams inside Triton kernels
- `filters_triton`: the filters of a row inside Triton kernels, without an order of its tokens
- `draw_triton`: filters and a draw in Triton
- `draw`: the same by either way
- `top_tokens`: sparse distributions: top tokens and the mass outside
- `logged_compiled`: the same as records hold them, by a compiled kernel
- `logged`: the same by either way, of logits and of an engine's round
- `vocabulary`: draft logits over the target's vocabulary

Other chapters import `draw`, `draw_compiled`, `filters`, `logged`, `logged_compiled`,
`random_streams`, `top_tokens` and `vocabulary`.
"""
