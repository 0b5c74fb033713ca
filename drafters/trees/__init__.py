"""Trees of drafted tokens grown by a head.

Files in reading order:
- `candidates`: distributions at the nodes and the children drawn from them; trees of given
  choices
- `nodes`: the table of nodes, and their positions in a target pass
- `level_graphs`: CUDA graphs of a level
- `growth`: dynamic and sampled trees, a level in one pass

Other chapters import `growth`, `candidates` and `nodes`.
"""
