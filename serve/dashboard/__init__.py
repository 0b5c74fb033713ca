"""`/dashboard` and `draftsmith top`.

Files in reading order:
- `board`: data of a server
- `samples`: counters over time
- `learning`: what learning left on disk
- `live_text`: the live view of texts
- `page`: the page and its endpoints
- `schema`: its schema
- `config`: options of top
- `top`: `draftsmith top`
- `top_screen`: its lines

Other chapters import `board` and `page`.
"""
