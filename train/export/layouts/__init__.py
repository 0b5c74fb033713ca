"""Layouts that exports are written in.

Files in reading order:
- `table`: which family for which engine
- `source`: the draft and target exported from
- `plain`: draft LM and MLP speculator
- `portable`: heads and blocks as vLLM and SGLang read them
- `speculators`: the layout of the `speculators` library
- `eagle3_graphs`: what engines with a graph of their own for EAGLE-3 leave out
- `medusa`: Medusa
- `mtp`: MTP modules inside their target
- `vllm_faults`: releases of vLLM whose sampled speculation is biased
- `serving`: commands that serve an export
- `triton`: a repository for NVIDIA Triton

Other chapters import `table`, `source` and `vllm_faults`.
"""
