"""Between processes: `polling` (waiting for descriptors, the event loop), `json_lines` (the codec of messages),
`connecting` and `acceptor` (TCP), `job_secret` and `rank_proof` (who belongs to a job), `host` and `addresses`.
"""
