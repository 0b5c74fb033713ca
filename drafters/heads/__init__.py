"""Draft heads on the target's states.

Files in reading order:
- `feature_head`: shared by heads that read their own states
- `eagle1`: EAGLE-1 and EAGLE-2
- `eagle3`: EAGLE-3
- `layer_kinds`: kinds of decoder layers that it is published with
- `eagle3_layer`: its decoder layer
- `peagle`: P-EAGLE
- `mtp`: MTP modules of Llama layers
- `mtp_alone`: new ones beside their target
- `mtp_head`: the forward of an MTP module
- `mtp_mimo`: MiMo's layout
- `mtp_layouts`: modules that targets bring along
- `mtp_deepseek`: one whose block is a layer of the target's kind
- `mtp_deep`: several of these, one for each drafted token

Other chapters import families through `drafters/registry.py`.
"""
