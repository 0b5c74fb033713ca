"""Steps of a vLLM worker as messages for the writer: what is recorded of them.

Files in reading order:
- `seam`: calls of the rejection sampler
- `requests`: requests that are recorded
- `recorder`: wrappers of one worker's calls

`vllm` imports `recorder` and `seam`.
"""
