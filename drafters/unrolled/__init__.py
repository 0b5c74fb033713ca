"""Attention of training passes, in which every column of a text drafts at once.

Files in reading order:
- `fused_unroll`: attention of long texts on a CPU, part by part
- `flex`: attention on a CUDA device
- `attention`: the choice between these and a mask over chunks of columns
- `unroll`: all depths of a head over one text

Other chapters import all of it.
"""
