"""Drafting one token at a time from the drafter's own states.

Files in reading order:
- `rotary`: positions of its layers
- `state`: states and protocols
- `draft_sampler`: draws drafted tokens and keeps their distributions
- `catch_up`: reads the committed tokens that the drafter has not read
- `graph_shapes`: captured graphs by shape
- `chain_buffers`: a chain's state at fixed addresses
- `padded_round`: a decoding round in the shape of a graph
- `catch_up_graphs`: CUDA graphs of catching up and the first draw
- `chain_graphs`: CUDA graphs of the steps after it
- `draft_loop`: a round
- `chain`: a round of a chain, token by token
- `call_graphs`: a round of calls that draft all tokens at once, and their CUDA graphs

Other chapters import all of it.
"""
