"""Tool calls and reasoning in the text of answers.

Files in reading order:
- `calls`: calls and pieces of an answer
- `json_text`: JSON in text that is still being written
- `call_format`: the interface of a format of calls
- `hermes`: Hermes and Qwen
- `llama`: Llama 3
- `mistral`: Mistral
- `scanner`: calls in a text that comes in pieces
- `reasoning`: reasoning before the answer
- `answer`: reasoning, text and calls of an answer
- `grammars`: grammars of calls, formats and reasoning together
- `template`: formats that a chat template shows

Other chapters import `template`, `answer`, `grammars`, `calls`.
"""
