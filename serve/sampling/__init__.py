"""Sampling parameters of a request and the logits they act on.

Files in reading order:
- `params`: parameters and their checks
- `state`: counts that parameters depend on; failures that concern one request
- `tables`: biases, penalties and bans of a round as tensors of its device
- `adjustments`: all of them in order, for many rows, with what needs the tokens on the host
- `grammar`: grammars as values, tried in a process of their own
- `grammar_matcher`: grammars as masks over tokens

Other chapters import `params`, `state`, `adjustments`.
"""
