"""Decisions about versions.

Files in reading order:
- `gate`: promotion of a candidate, and drafts kept for other target weights
- `scoring`: alpha on served traffic
- `logged`: drafted positions of records, a draft's states there, alpha from logged probabilities
- `sequential`: evidence that may be looked at any time
- `regression`: roll back of a worse version
- `drift`: drift of traffic

Other chapters import all of it.
"""
