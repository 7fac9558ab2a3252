"""Which rank comes late to collectives, and what that costs.

`lateness` computes it from the times at which ranks came; `page_arrivals` reads these from outside.
"""
