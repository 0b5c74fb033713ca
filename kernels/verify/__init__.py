"""Verification of drafted tokens by rejection sampling: the output has the target's distribution.

Accepted: drafted tokens kept. Recovered: the token drawn from the residual distribution after the
first rejected one. Bonus: the token drawn from the target after a proposal that was kept whole.
Output: accepted tokens and the one token after them.

Files in reading order:
- `verdict`: drafted tokens and results
- `residual`: acceptance test and residual distribution
- `chain`: token by token; the reference
- `chain_triton`: the same in Triton, in one launch
- `chain_compiled`: the same from raw logits, by a compiled kernel for a CPU
- `chain_logits`: the same of a whole round from raw logits, by one of these
- `block`: all tokens of a proposal together
- `block_triton`: the same in Triton
- `draft_tree`: the shape of a tree of drafted tokens
- `tree`: a tree; the reference
- `tree_triton`: the same in Triton
- `rows_triton`: rows of logits as distributions inside Triton kernels
- `lossy`: rules that change the output distribution, labelled so

Other chapters import `chain`, `chain_logits`, `block`, `tree`, `draft_tree`, `verdict` and
`lossy`.
"""
