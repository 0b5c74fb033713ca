"""Attention of training passes, in which every column of a text drafts at once.

Files in reading order:
- `fused_parts`: attention of true keys on a CPU, part by part
- `fused_unroll`: attention of an unroll over long texts on a CPU
- `flex`: attention on a CUDA device
- `unroll`: all depths of a head over one text

Other chapters import all of it.
"""
