"""`/dashboard` and `draftsmith top`: one source of data, two views.

Files in reading order:
- `data`: facts, tables and points over time
- `page`: the page, and the endpoint that both views read
- `config`: options of top
- `top`: `draftsmith top`

Other chapters import `page` and `data`.
"""
