"""Versions of a fleet on any file system that fsspec supports: what an engine reads of them, and
the status that it leaves. Loads nothing of draftsmith outside `fleet`, and no torch.

Files in reading order:
- `errors`: sentences about a store and its versions
- `objects`: bytes of a folder or bucket, with bounded retries
- `layout`: names of the objects, `current`, the manifest
- `engine_status`: status of one engine
- `rollout`: rollout.json, and the version that it gives an engine
- `cache`: verified copies on a local disk
- `pace`: jitter of polls and downloads, waits after failures
- `floor`: when an engine gives a version up by itself
- `store`: all of it behind one address

Other chapters import `store`, `engine_status`, `rollout`, `pace`, `floor` and `errors`.
"""
