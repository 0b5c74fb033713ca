"""Published drafts on disk; torch-free.

Files in reading order:
- `versions`: VERSIONS/vNNNNNN folders, `current` and `canary.json`
- `pool`: drafts of request classes
- `prompt_clusters`: classes of untagged prompts

Other chapters import all of it.
"""
