"""Layouts that exports are written in.

Files in reading order:
- `table`: which family for which engine
- `source`: the draft and target exported from
- `plain`: draft LM and MLP speculator
- `eagle1`: EAGLE-1
- `eagle3`: EAGLE-3
- `eagle3_graphs`: what engines with a graph of their own for EAGLE-3 leave out
- `peagle`: P-EAGLE
- `medusa`: Medusa
- `mtp`: MTP modules inside their target
- `mtp_speculators`: MTP modules for the `speculators` library
- `block`: DFlash and DSpark
- `vllm_faults`: releases of vLLM whose sampled speculation is biased
- `serving`: commands that serve an export
- `triton`: a repository for NVIDIA Triton

Other chapters import `table`, `source` and `vllm_faults`.
"""
