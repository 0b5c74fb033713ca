"""Training data from disk to batches.

Files in reading order:
- `dataset`: the data folder as sequences, long texts cut or split
- `folders`: weights of several folders
- `mixture`: several folders as one
- `batches`: padding, packing and order
- `stored_taps`: stored hidden states

Other chapters import all of it.
"""
