"""Sampling parameters of a request and the logits they act on.

Files in reading order:
- `params`: parameters and their checks
- `state`: counts that parameters depend on
- `penalties`: penalties of a round, on its device
- `tables`: biases, penalties and bans of a round as tensors of its device
- `stages`: bans and masks that need the tokens on the host
- `adjustments`: all of them in order, for many rows
- `processors`: transformers' logits processors
- `grammar`: grammars as values
- `grammar_trial`: grammars tried in a process of their own
- `grammar_matcher`: grammars as masks over tokens
- `request_errors`: failures that concern one request

Other chapters import `params`, `state`, `adjustments`.
"""
