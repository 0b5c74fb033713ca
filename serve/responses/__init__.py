"""OpenAI's Responses API, over the parts of the chat endpoint.

Files in reading order:
- `endpoint`: `/v1/responses`
- `protocol`: request bodies
- `conversation`: input items as messages, the request as a chat request
- `items`: output items and the events of a stream
- `responder`: response objects
- `schema`: their schema

Other chapters import `endpoint`.
"""
