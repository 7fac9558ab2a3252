import rankwise as rw


def load(shard: int) -> list[float]:
    if shard == 1:
        raise FileNotFoundError(f"data/shard-{shard}.bin")
    return [0.5, 0.25]


with rw.init(device="cpu"):
    losses = load(rw.get_rank())
    print(rw.all_reduce(sum(losses), op="mean"))
