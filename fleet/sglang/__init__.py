"""Plugin for SGLang 0.5.23, by its own entry point `sglang.srt.plugins`: records out of it, and
versions into it by its own endpoints.

Written from its released source and tested with stand-ins of its calls: it was never run with
SGLang, which has no build for CPUs.

Files in reading order:
- `plugin`: entry point and settings
- `requests`: requests that are recorded, by SGLang's names
- `trees`: kept path of a verified tree
- `recorder`: one scheduler's verifications as messages for the writer
- `push`: versions pushed through SGLang's weight updates

Other chapters import none of it.
"""
