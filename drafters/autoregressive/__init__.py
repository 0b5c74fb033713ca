"""Drafting one token at a time from the drafter's own states.

Files in reading order:
- `rotary`: positions of its layers
- `state`: states and protocols
- `draft_sampler`: draws drafted tokens and keeps their distributions
- `chain`: a chain of drafted tokens
- `chain_graphs`: CUDA graphs of its steps
- `unroll`: training: all depths of a head over one text

Other chapters import all of it.
"""
