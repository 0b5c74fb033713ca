"""Draft heads on one final state of the target, without attention.

Files in reading order:
- `state_head`: shared by all of them
- `medusa`: Medusa
- `mlp`: the MLP speculator
- `mlp_layout`: its folders as others publish them
- `mlp_lstm`: its LSTM kind

Other chapters import families through `drafters/registry.py`.
"""
