"""Decisions about versions.

Files in reading order:
- `gate`: promotion of a candidate
- `scoring`: alpha on served traffic
- `positions`: drafted positions, and a draft's states there
- `logged`: alpha from logged probabilities
- `sequential`: evidence that may be looked at any time
- `regression`: roll back of a worse version
- `canary`: a version on trial
- `drift`: drift of traffic
- `class_comparison`: drafts of classes against the live draft
- `quarantine`: drafts for other target weights

Other chapters import all of it.
"""
