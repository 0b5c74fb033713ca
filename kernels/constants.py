"""Constants that torch-free modules share with the kernels. Torch-free."""

# Nodes of a draft tree: a node and its ancestors are the bits of one non-negative int64, the root
# included.
MAX_NODES = 62
# Padding of block tables; never handed out, so a padded read meets finite zeros.
NULL_BLOCK = 0
# Below this, logits / temperature of ordinary models nears the float32 range and the distribution
# is greedy anyway.
MIN_TEMPERATURE = 1e-6
