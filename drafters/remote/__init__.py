"""A target on a server: its pass is made there, and what drafts share with it is kept here.

Files in reading order:
- `messages`: texts and their states as bodies of requests
- `service`: the server's part
- `revision`: revision of the weights in a folder, without loading them
- `kept_connections`: requests over connections that a server may close
- `connection`: requests, repeated while a server is away
- `parts`: weights of the target that come from the server
- `rounds`: passes of speculative rounds
- `checks`: whether a server has the model that it should
- `completions`: likeliest tokens by a server without states
- `target`: the target as the client has it
- `outline`: a target without weights, which nothing runs
- `place`: a target here or on a server, as options say

Other chapters import `messages`, `service`, `kept_connections`, `connection`, `completions`,
`target`, `outline` and `place`.
"""
