"""Layouts that exports are written in.

Files in reading order:
- `table`: which family for which engine
- `source`: the draft and target exported from
- `plain`: draft LM, MLP speculator and Medusa
- `portable`: heads and blocks as vLLM and SGLang read them
- `speculators`: the layout of the `speculators` library
- `mtp`: MTP modules inside their target
- `vllm_faults`: releases of vLLM whose sampled speculation is biased
- `gguf`: files for llama.cpp
- `gguf_vocabulary`: tokens in them
- `openvino`: OpenVINO GenAI
- `serving`: commands that serve an export, and a repository for NVIDIA Triton
"""
