"""Which rank comes late to collectives, and what that costs.

`lateness` computes it from the times at which ranks came; `page_arrivals` reads these from outside.
`recording` is the file that has all calls of a rank, `reading` compares those of all ranks, and `report` shows them.
"""
