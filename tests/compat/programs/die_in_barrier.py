"""Open a process group as torch's users do, and let one rank be killed while the others wait for it."""

import os
import signal
import sys

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
