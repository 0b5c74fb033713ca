"""`/dashboard` and `draftsmith top`.

Files in reading order:
- `samples`: counters over time
- `learning`: versions, decisions and status of learning, from disk
- `live_text`: the live view of texts
- `page`: the state behind the page, and its endpoints
- `schema`: its schema
- `config`: options of top
- `top`: `draftsmith top`
- `top_screen`: its lines

Other chapters import `page` and the parts of its state: `samples`, `learning`, `live_text`.
"""
