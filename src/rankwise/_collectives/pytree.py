"""Flattening of nested containers into leaves, in an order that is the same on all ranks, and rebuilding them.

This is done by optree. Some containers are converted to `_CustomNode`, which optree knows as a node of its own:
OrderedDict, which optree would order by insertion; defaultdict, whose description would contain an address;
dataclasses, which optree would treat as leaves.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import optree
import torch

from rankwise.errors import PayloadTypeError, shown

_NAMESPACE: Final = "rankwise"
_PLAIN_KEYS: Final = frozenset({str, int, bool})
# Checked first, since `_is_custom` is called for every leaf.
_LEAF_TYPES: Final = frozenset({type(None), bool, int, float, complex, torch.Tensor})
# The description of a number: the ranks may have different types of numbers.
A_NUMBER: Final = "a number"
_COMMON_TYPES: Final = _LEAF_TYPES | {dict, list, tuple}


@dataclass(slots=True)
class PyTree:
    """A flattened value.

    Attributes:
        leaves: Its leaves: all values that are not containers, including None.
        spec: The structure of its containers.
        text: A description of that structure; ranks with the same structure have the same description.
    """

    leaves: list[Any]
    spec: optree.PyTreeSpec
    text: str

    @classmethod
    def of(cls, value: object) -> PyTree:
        """Flatten a value.

        Raises:
            PayloadTypeError: A key is not a str, an int, a bool, an Enum or a tuple of these; a field of a dataclass
                has no value; the value contains itself; or its containers are nested too deeply.
        """
        if type(value) in _LEAF_TYPES:
            return cls([value], _LEAF_SPEC, _LEAF_TEXT)
        try:
            # optree alone, in C++, is enough for most values. Only a value that contains a container or a key that
            # optree might treat differently on another rank is walked in Python, and flattened again.
            leaves, spec = _flatten(value, is_leaf=_is_custom)
            if any(map(_is_custom, leaves)) or not _check_keys(spec.paths()):
                leaves, spec = _flatten(_with_custom_nodes(value))
            return cls(leaves, spec, repr(spec))
        except RecursionError:
            raise _too_deep() from None

    def rebuild(self, leaves: Iterable[object]) -> Any:  # noqa: ANN401 - the type of the value
        """Return new containers of the same structure, with other leaves."""
        if self.spec is _LEAF_SPEC:
            (leaf,) = leaves
            return leaf
        return optree.tree_unflatten(self.spec, leaves)

    def paths(self) -> list[str]:
        """Return the path of each leaf: "['loss'][0]"."""
        return [
            "".join(entry if isinstance(entry, _AttributeKey) else f"[{entry!r}]" for entry in path)
            for path in self.spec.paths()
        ]

    def parts(self, described: Iterable[str]) -> dict[str, str]:
        """Return a description of each container and leaf, by path, given those of the leaves: for error messages."""
        parts: dict[str, str] = {}
        waiting: list[tuple[str, Any]] = [("", self.rebuild(map(_Description, described)))]
        while waiting:
            path, value = waiting.pop()
            if isinstance(value, _Description):
                parts[path] = str(value)
            else:
                name = type(value).__qualname__
                parts[path] = f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
                waiting += reversed([(f"{path}{key}", child) for key, child in _children(value)])
        return parts


class _Description(str):
    """The description of a leaf, in its place."""

    __slots__ = ()


def _children(value: Any) -> Iterable[tuple[str, Any]]:  # noqa: ANN401 - any container
    """Return the children of a container, each with the end of its path."""
    if isinstance(value, dict):
        return [(f"[{_canonical_key(key)!r}]", child) for key, child in value.items()]
    if dataclasses.is_dataclass(value):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    children, _, entries, _ = optree.tree_flatten_one_level(value, none_is_leaf=True, namespace=_NAMESPACE)
    return zip((f"[{entry!r}]" for entry in entries), children, strict=True)


def describe(value: object) -> str:
    """Return a description of a tensor, or of another leaf, that has to be the same on all ranks.

    Local.

    Example:
        >>> describe(torch.ones(3, 4))
        'float32[3, 4] on cpu'
    """
    if isinstance(value, torch.Tensor):
        try:
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device.type}"
        except Exception:  # noqa: BLE001 - lazy and nested tensors have no shape, and subclasses raise any error
            return f"a {type(value).__qualname__} without a shape"
    if value is None:
        return "None"
    # `numbers.Number` is an abstract class, whose check takes longer.
    is_number = type(value) in _LEAF_TYPES or isinstance(value, numbers.Number)
    return A_NUMBER if is_number else f"a {type(value).__qualname__}"


class _AttributeKey(str):
    """The key of a field of a dataclass: ".loss"."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _NodeSpec:
    """The type and keys of a node.

    Attributes:
        label: The name of its type, which has to be the same on all ranks.
        entries: The keys of its children.
        rebuild: Returns a new container, given new children.
    """

    label: str
    entries: tuple[Hashable, ...]
    rebuild: Callable[[Sequence[Any]], Any]

    def __repr__(self) -> str:
        return f"{self.label}{self.entries!r}"


@dataclass(frozen=True, slots=True)
class _CustomNode:
    """A container that is flattened by this module instead of optree."""

    spec: _NodeSpec
    children: tuple[Any, ...]


optree.register_pytree_node(
    _CustomNode,  # type: ignore[arg-type]  # optree's type asks for a collection, its documentation for any class
    lambda node: (node.children, node.spec, node.spec.entries),  # type: ignore[attr-defined]
    lambda spec, children: spec.rebuild(children),  # type: ignore[union-attr]
    namespace=_NAMESPACE,
)


def _flatten(value: object, is_leaf: Callable[[object], bool] | None = None) -> tuple[list[Any], optree.PyTreeSpec]:
    return optree.tree_flatten(value, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)  # type: ignore[arg-type]


# Of a value that is a leaf itself.
_LEAF_SPEC: Final = _flatten(None)[1]
_LEAF_TEXT: Final = repr(_LEAF_SPEC)


def _is_custom(value: object) -> bool:
    """Return whether `_with_custom_nodes` treats a value as a container that optree shall not flatten."""
    value_type = type(value)
    if value_type in _COMMON_TYPES:
        return False
    return issubclass(value_type, dict) or value_type is torch.Size or dataclasses.is_dataclass(value_type)


def _with_custom_nodes(value: Any) -> Any:  # noqa: ANN401 - any value of the user's
    """Return the value with dicts and dataclasses, at all levels, replaced by custom nodes."""
    if isinstance(value, dict):
        _check_keys([(key,) for key in value])
        keys = sorted(value, key=lambda key: (type(_canonical_key(key)).__qualname__, repr(_canonical_key(key))))
        return _CustomNode(_dict_spec(value, keys), tuple(_with_custom_nodes(value[key]) for key in keys))
    if isinstance(value, torch.Size):
        return tuple(value)  # its results are not sizes: a mean is a float
    if _is_custom(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return _CustomNode(
            _dataclass_spec(value, fields), tuple(_with_custom_nodes(_field(value, name)) for name in fields)
        )
    try:
        children, metadata, _, rebuild = optree.tree_flatten_one_level(value, none_is_leaf=True, namespace=_NAMESPACE)
    except ValueError:  # a leaf
        return value
    return rebuild(metadata, [_with_custom_nodes(child) for child in children])


def _dict_spec(value: dict[Any, Any], keys: list[Any]) -> _NodeSpec:
    def rebuild(children: Sequence[Any]) -> Any:  # noqa: ANN401 - the type of the value
        by_key = dict(zip(keys, children, strict=True))
        # A copy keeps the class, the attributes and the order of this rank's dict; those of other ranks may differ.
        new = copy.copy(value)
        for key in value:
            new[key] = by_key[key]
        return new

    return _NodeSpec("dict", tuple(map(_canonical_key, keys)), rebuild)


def _dataclass_spec(value: Any, fields: list[str]) -> _NodeSpec:  # noqa: ANN401 - the user's dataclass
    def rebuild(children: Sequence[Any]) -> Any:  # noqa: ANN401 - the type of the value
        new = copy.copy(value)
        for name, child in zip(fields, children, strict=True):
            object.__setattr__(new, name, child)  # also works for frozen ones
        return new

    return _NodeSpec(type(value).__qualname__, tuple(_AttributeKey(f".{name}") for name in fields), rebuild)


def _too_deep() -> PayloadTypeError:
    return PayloadTypeError("a value that is reduced contains itself, or its containers are nested too deeply")


def _field(value: object, name: str) -> Any:  # noqa: ANN401 - any value of the user's
    try:
        return getattr(value, name)
    except AttributeError as error:
        raise PayloadTypeError(f"a {type(value).__qualname__} that is reduced has no value in {name!r}") from error


def _check_keys(paths: Iterable[tuple[Any, ...]]) -> bool:
    """Check the keys of dicts; return False if optree may order some of them differently on another rank."""
    key_types = {type(key) for path in paths for key in path}
    if key_types <= _PLAIN_KEYS:
        return True
    for path in paths:
        for key in path:
            if not _is_key(key):
                raise PayloadTypeError(
                    f"a dict that is reduced has the key {shown(key)}; keys must be str, int, bool, Enum or "
                    "tuples of these, so that all ranks put them in the same order"
                )
    return False


def _is_key(key: object) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_key, key))
    return isinstance(key, (str, numbers.Integral, Enum))


def _canonical_key(key: Any) -> Any:  # noqa: ANN401 - any key of the user's
    """Return a key as a Python object that equals the keys of other ranks: a rank's own key may be a numpy scalar."""
    if isinstance(key, (Enum, bool)):
        return key
    if isinstance(key, numbers.Integral):
        return int(key)
    if isinstance(key, tuple):
        return tuple(map(_canonical_key, key))
    return str.__str__(key)
