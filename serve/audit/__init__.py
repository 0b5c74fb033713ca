"""`draftsmith audit`: tests that speculation is lossless.

Files in reading order:
- `command`: the command, and the audit of a running server
- `config`: its options
- `report`: checks, controls and the verdict
- `kernels`: the audit of this machine's kernels
- `client`: requests to a server
- `reference`: reference distributions
- `samples`: sampled continuations, the depth in its round of each token, two servers compared
- `tokens`: tokens beside their distributions
- `greedy`: greedy texts, alone and of requests of unlike length in flight at once

Other chapters import `command`.
"""
