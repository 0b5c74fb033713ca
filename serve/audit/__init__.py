"""`draftsmith audit`: tests that speculation is lossless.

Files in reading order:
- `command`: the command
- `config`: its options
- `report`: checks, controls and the verdict
- `kernels`: the audit of this machine's kernels
- `server`: the audit of a running server
- `client`: requests to it
- `samples`: sampled continuations
- `depths`: depth in its round of each token
- `tokens`: tokens beside their distributions
- `reference`: reference distributions
- `greedy`: greedy texts
- `together`: greedy texts of requests of unlike length in flight at once
- `two_samples`: two servers compared
- `misreport`: a wrong server on purpose, for tests

Other chapters import `command` and `misreport`.
"""
