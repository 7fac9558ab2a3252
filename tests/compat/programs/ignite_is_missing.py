"""Where there is no Ignite the drop-in works, and standing in for it is refused and leaves nothing."""

import sys

import rankwise.compat.ignite as idist


class NoIgnite:
    """Finds no Ignite."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "ignite":
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, NoIgnite())
try:
    idist.install()
except ModuleNotFoundError:
    assert not [name for name in sys.modules if name.startswith("ignite")]
    assert idist.all_gather("é") == ["é"]
    print("ok")
