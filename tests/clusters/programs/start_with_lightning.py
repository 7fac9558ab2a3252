"""Start this process again for a second device, as Lightning's `Trainer(devices=2)` does without torchrun; join."""

import json
import os
import sys

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

import rankwise as rw

_SubprocessScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=1).launch(lambda: None)
with rw.init(timeout=100):
    found = {"launcher": rw.detect(os.environ).launcher, "rank": rw.get_rank(), "local_rank": rw.get_local_rank()}
    sys.stdout.write(json.dumps(found | {"world_size": rw.get_world_size(), "total": rw.all_reduce(1)}) + "\n")
