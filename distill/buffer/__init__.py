"""The traffic buffer between servers and learner.

Files in reading order:
- `buffer`: writers and readers
- `process`: a server's records to a writer process, as messages in shared memory
- `process_writer`: the process
- `objects`: bytes of a folder or bucket
- `folder`: its folder on any file system
- `marks`: progress of readers and deletions
- `record_table`: records as an Arrow table, and files of them in a saved state
- `redaction`: masking before storage
- `known_taps`: the target's states in a text's records
- `forget`: `draftsmith forget`
- `traffic`: records stitched to texts

Other chapters import all of it.
"""
