"""Versions of a fleet on any file system that fsspec supports: what an engine reads of them, and
the status that it leaves. Loads no torch and no Arrow, and of draftsmith hardly more than `fleet`.

Files in reading order:
- `layout`: names of the objects, `current`, the manifest, an engine's status, errors
- `rollout`: rollout.json, and the version that it gives an engine
- `cache`: verified copies on a local disk
- `store`: all of it behind one address

Other chapters import `store`, `layout` and `rollout`.
"""
