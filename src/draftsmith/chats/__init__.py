"""Conversations as text and tokens: one way for every door to a chat template; torch is not needed.

Files in reading order:
- `messages`: messages and tools as chat templates take them
- `template`: the text that a chat template makes of them
- `answers`: prompts with the answers that a conversation holds, and the end of an answer

Every code folder may import this chapter.
"""
