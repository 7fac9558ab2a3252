"""The variables of launchers, as facts with their sources: pure functions of a mapping, without torch.

`detect` asks one launcher after the other. They stand in families: `torch_like`, `mpi`, `schedulers`, `clouds`, `tpu`;
most are an entry of a table (`table_launcher`). `facts` is what they return. `single` and `unsupported` refuse
variables that are incomplete, `nesting` tells launchers inside of others apart, and `candidates` explains a choice.
"""
