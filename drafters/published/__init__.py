"""Published drafts on disk; torch-free.

Files in reading order:
- `versions`: VERSIONS/vNNNNNN folders and `current`
- `canary`: a version on trial
- `pool`: drafts of request classes
- `prompt_clusters`: classes of untagged prompts

Other chapters import all of it.
"""
