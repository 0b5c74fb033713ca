"""Draft heads on the target's states.

Files in reading order:
- `feature_head`: shared by heads that read their own states
- `eagle1`: EAGLE-1 and EAGLE-2
- `eagle3`: EAGLE-3
- `eagle3_layer`: its decoder layer and the kinds that it is published with
- `peagle`: P-EAGLE
- `mtp`: MTP modules of Llama layers
- `mtp_head`: the forward of an MTP module
- `mtp_layouts`: modules that targets bring along
- `mtp_deepseek`: those whose block is a layer of the target's kind

Other chapters import families through `drafters/registry.py`.
"""
