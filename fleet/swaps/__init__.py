"""Swaps of drafts inside a worker of vLLM: a version is checked, loaded into a second copy of the
draft module beside the served one, tried there, and copied over between two steps.

Files in reading order:
- `checks`: files of a version compared with those of the served draft
- `packed`: tensors that a module's forward pass reads, kernels' packed ones included
- `proposer`: the draft of one worker, inputs of its recent steps, and all private names of vLLM
- `staging`: the second copy, loaded by a thread and tried on recent and fixed inputs
- `swap`: stages, applies and takes back versions of one worker; updates of the draft by others
"""
