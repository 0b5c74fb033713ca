"""Sources of prompts and texts: the standard library, or files as people have them.

- `shares`: numbers by which a name alone decides: held-out prompts, recorded requests
- `corpus`: text of the standard library
- `shapes`: a row of a published shape as conversation, prompt or text
- `encoded`: text of a file that may be compressed, in the encoding that it names
- `json_values`: values of JSON lines, of an array, or one after the other
- `sources`: rows of a file, a folder or a data set
- `published`: suites as their authors publish them, fetched once
- `suites`: conversations of a suite, by task, and public prompts to train on, none of a suite
"""
