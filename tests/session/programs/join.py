"""Join, say who this is, and leave. Errors of rankwise go to stderr in one line."""

import json
import sys
from dataclasses import asdict

import rankwise as rw

timeout = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
try:
    with rw.init(timeout=timeout, **options):
        total = rw.all_reduce(1)
        told = asdict(rw.topology()) | {"total": total, "gathered": rw.all_gather(rw.get_rank())}
        sys.stdout.write(json.dumps(told) + "\n")  # in one piece: several ranks share the pipe
except rw.RankwiseError as error:
    sys.exit(f"{type(error).__name__}: {error}")
