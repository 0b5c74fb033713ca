"""OpenAI's endpoints over the engine's loop.

Files in reading order:
- `server`: state of all endpoints
- `protocol`: request bodies
- `tokens`: texts as token ids
- `threads`: threads beside the event loop
- `streams`: requests to the engine and their updates
- `responses`: response bodies
- `chat`: a chat request as prompt, grammar and form of its answer; its response bodies
- `completions`: completions and chat
- `endpoints`: health, models, tokenizer, drafting, learning
- `speculation_report`: drafts of one request
- `errors`: errors
- `limits`: keys and limits
- `schema`: `/openapi.json`

Other chapters import what the server is put together of: `server`, `limits`, the endpoints; and
`errors`, `schema`, `responses`, `tokens`.
"""
