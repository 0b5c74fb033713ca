"""OpenAI's endpoints over the engine's loop.

Files in reading order:
- `server`: state of all endpoints
- `bodies`: parts of request bodies: formats of answers, messages, tools
- `protocol`: request bodies
- `tokens`: texts as token ids
- `streams`: requests to the engine, threads beside the event loop, the report of drafts
- `responses`: response bodies
- `chat`: a chat request as prompt, grammar and form of its answer; its response bodies
- `completions`: completions and chat
- `responses_body`: request bodies of the Responses API, as chat requests
- `responses_api`: the Responses API, over the parts of the chat endpoint
- `endpoints`: health, models, tokenizer, drafting, learning
- `errors`: errors
- `limits`: keys and limits
- `schema`: `/openapi.json`

Other chapters import what the server is put together of: `server`, `limits`, the endpoints; and
`errors`, `schema`, `responses`, `tokens`.
"""
