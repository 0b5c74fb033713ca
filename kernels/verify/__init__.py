"""Verification of drafted tokens by rejection sampling: the output has the target's distribution.

Accepted: drafted tokens kept. Recovered: the token drawn from the residual distribution after the
first rejected one. Bonus: the token drawn from the target after a proposal that was kept whole.
Output: accepted tokens and the one token after them.

Files in reading order:
- `verdict`: drafted tokens, chains and trees, and results
- `residual`: acceptance test and residual distribution
- `chain`: token by token; the reference, and a whole round from raw logits
- `chain_triton`: the same in Triton, in three launches
- `block`: all tokens of a proposal together
- `block_triton`: the same in Triton
- `tree`: a tree; the reference
- `tree_triton`: the same in Triton
- `tree_race_triton`: the token that a tree's walk ends with
- `rows_triton`: rows of logits as distributions inside Triton kernels
- `race_triton`: the race for the token of a chain's or block's deciding row

Other chapters import `chain`, `block`, `tree` and `verdict`.
"""
