"""Versions of a fleet on any file system that fsspec supports: what an engine reads of them, the
status that it leaves, and the learner's versions put there.

Files in reading order:
- `layout`: names of the objects, `current`, the manifest, an engine's status, errors
- `store`: all of it behind one address, and verified copies on a local disk
- `mirror`: `draftsmith fleet publish`: whatever the learner makes live in the layouts of engines,
  each version's manifest last, and old versions deleted
- `show`: status, promote and rollback

`layout` and `store`, which an engine imports, load no torch and no Arrow, and of draftsmith hardly
more than `fleet`.
"""
