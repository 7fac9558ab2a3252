"""The pytest plugin. In pytest's own process: `scheduler` (which test runs where), `worlds` and `worker_pool` (the
ranks), `runner` (the phases of one test), `merged_report`. In a rank: `rank_session`, `collection`, `leaks`. `messages`
is what they send.
"""
