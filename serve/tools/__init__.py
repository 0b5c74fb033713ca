"""Tool calls and reasoning in the text of answers.

Files in reading order:
- `call_format`: tools, pieces of an answer, and the interface of a format of calls
- `formats`: Hermes and Qwen, Llama 3, Mistral
- `answer`: reasoning, text and calls of an answer that comes in pieces
- `template`: formats that a chat template shows; grammars of answers

Other chapters import `template`, `answer`, `call_format`.
"""
