"""Versions of a fleet on any file system that fsspec supports: what an engine reads of them, and
the status that it leaves. Loads nothing of draftsmith outside `fleet`, and no torch.

Files in reading order:
- `layout`: names of the objects, `current`, the manifest, an engine's status, errors
- `objects`: bytes of a folder or bucket, with bounded retries
- `rollout`: rollout.json, and the version that it gives an engine
- `cache`: verified copies on a local disk
- `store`: all of it behind one address

Other chapters import `store`, `layout` and `rollout`.
"""
