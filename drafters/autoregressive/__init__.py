"""Drafting one token at a time from the drafter's own states.

Files in reading order:
- `state`: states and protocols
- `draft_sampler`: draws drafted tokens and keeps their distributions
- `catch_up`: reads the committed tokens that the drafter has not read
- `chain_buffers`: a chain's state at fixed addresses
- `padded_round`: a decoding round in the shape of a graph, and graphs of it
- `chain_graphs`: CUDA graphs of a chain
- `chain`: a round of a chain, token by token
- `call_graphs`: a round of calls that draft all tokens at once, and their CUDA graphs

Other chapters import all of it.
"""
