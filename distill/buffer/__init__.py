"""The traffic buffer between servers and learner.

Files in reading order:
- `buffer`: writers and readers
- `process`: a server's records to a writer process, as messages in shared memory
- `process_writer`: the process
- `objects`: bytes of a folder or bucket
- `folder`: shards, cursors, marks of readers and deletions, `draftsmith forget`
- `record_table`: records as an Arrow table
- `redaction`: masking before storage
- `traffic`: records stitched to texts, and the target's states in them

Other chapters import all of it.
"""
