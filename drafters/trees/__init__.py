"""Trees of drafted tokens grown by a head.

Files in reading order:
- `candidates`: distributions at the nodes and the children drawn from them
- `nodes`: the table of nodes
- `layout`: positions of trees in a target pass
- `level_graphs`: CUDA graphs of a level
- `tree_reader`: reads a level of nodes in one pass
- `growth`: dynamic and sampled trees
- `fixed`: trees of given choices

Other chapters import `growth`, `fixed`, `nodes` and `layout`.
"""
