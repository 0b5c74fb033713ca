"""Parts of request bodies.

Files in reading order:
- `formats`: formats of answers; the strict base of all bodies
- `accepted`: fields that cannot change an answer
- `messages`: messages of a conversation
- `tools`: tools and the choice between them

Other chapters import all of it.
"""
