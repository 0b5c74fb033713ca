"""Swaps of drafts inside a worker of vLLM: a version is checked, loaded into a second copy of the
draft module beside the served one, tried there, and copied over between two steps.

Files in reading order:
- `checks`: files of a version compared with those of the served draft
- `packed`: tensors that a module's forward pass reads, kernels' packed ones included
- `recent`: inputs of recent steps, kept for trials
- `proposer`: the draft of one worker, and all private names of vLLM
- `trial`: one forward pass of a draft on recent and fixed inputs
- `staging`: the second copy, loaded by a thread
- `swap`: stages, applies and takes back versions of one worker
- `prefixes`: cached prefixes that an older draft wrote
- `watch`: updates of the draft that others make
"""
