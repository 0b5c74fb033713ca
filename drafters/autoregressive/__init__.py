"""Drafting one token at a time from the drafter's own states.

Files in reading order:
- `state`: states, and the committed tokens that the drafter has not read
- `draft_sampler`: draws drafted tokens and keeps their distributions
- `padded_round`: a decoding round in the shape of a graph, and graphs of it
- `chain`: a round of a chain, token by token, and its CUDA graphs
- `call_graphs`: a round of calls that draft all tokens at once, and their CUDA graphs

Other chapters import all of it.
"""
