"""Layouts that exports are written in.

Files in reading order:
- `table`: which family for which engine
- `source`: the draft and target exported from
- `plain`: draft LM and MLP speculator
- `eagle1`: EAGLE-1
- `eagle3`: EAGLE-3
- `peagle`: P-EAGLE
- `medusa`: Medusa
- `mtp`: MTP modules inside their target
- `block`: DFlash and DSpark
- `serving`: commands that serve an export
- `triton`: a repository for NVIDIA Triton

Other chapters import `table` and `source`.
"""
