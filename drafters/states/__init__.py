"""Draft heads on one final state of the target, without attention.

Files in reading order:
- `state_head`: shared by all of them
- `medusa`: Medusa
- `mlp`: the MLP speculator, its folders as others publish them

Other chapters import families through `drafters/registry.py`.
"""
