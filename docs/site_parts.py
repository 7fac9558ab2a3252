"""What the site needs beyond Sphinx and its extensions: links from names in docstrings, and an index for programs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer

import rankwise as rw

if TYPE_CHECKING:
    from sphinx.util.typing import ExtensionMetadata

_FORWARD = (
    '<!doctype html><meta charset="utf-8"><title>rankwise</title><meta http-equiv="refresh" content="0; url={}">\n'
)
# Modules in which torch has defined what it documents elsewhere.
_TORCH: Final = {
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.distributed.distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
    "dist.ProcessGroup": "torch.distributed.ProcessGroup",
}
# Names of types that are written out in the descriptions of arguments.
_ALIASES: Final = {"Failures", "Preload", "_SizedSampler"}


def setup(app: Sphinx) -> ExtensionMetadata:
    """Connect to Sphinx."""
    app.connect("autodoc-process-docstring", link_names, priority=100)  # before napoleon takes the text apart
    app.connect("missing-reference", public_name, priority=400)  # before the inventories are looked up
    app.connect("build-finished", write_index)
    forget_overloads()
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def link_names(_app: Sphinx, _what: str, _name: str, obj: object, _options: object, lines: list[str]) -> None:
    """Turn `name` into a link, if it is that of a public object and of no argument, and otherwise into code."""
    try:
        arguments = set(inspect.signature(obj).parameters) if callable(obj) else set()
    except (TypeError, ValueError):
        arguments = set()

    def replaced(found: re.Match[str]) -> str:
        text = found[1]
        name = text.removesuffix("()").removeprefix("rankwise.")
        is_public = name in rw.__all__ and (text not in arguments)
        return f":py:obj:`{text} <rankwise.{name}>`" if is_public else f"``{text}``"

    for number, line in enumerate(lines):
        if not re.match(r" *(>>>|\.\.\. )", line):
            lines[number] = re.sub(r"(?<![`:])`([^`]+)`(?!`)", replaced, line)


def public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """Lead from the name of an object in its private module, or without a module, to the public one."""
    target = str(node["reftarget"])
    node["reftarget"] = _TORCH.get(target, target)
    name = target.rpartition(".")[2]
    if name in rw.__all__ and (target == name or target.startswith("rankwise.")):
        python = env.domains.python_domain
        return python.resolve_xref(env, node["refdoc"], app.builder, "obj", f"rankwise.{name}", node, content)
    is_private = target.startswith("rankwise._") or target in _ALIASES
    is_type_variable = re.fullmatch(r"(.*[.~])?[A-Z]", target) is not None
    is_hidden_option = node["reftype"] == "option"
    return content if is_private or is_type_variable or is_hidden_option else None


def forget_overloads() -> None:
    """Let autodoc show the signature of a function that has overloads, in place of up to 17 of them."""
    analyze = ModuleAnalyzer.analyze

    def analyze_without_overloads(self: Any) -> None:  # noqa: ANN401 - as the original
        analyze(self)
        self.overloads = {}

    # Only the dependencies of the docs have Sphinx.
    ModuleAnalyzer.analyze = analyze_without_overloads  # type: ignore[method-assign, unused-ignore]


def write_index(app: Sphinx, exception: Exception | None) -> None:
    """Write llms.txt, which lists the pages as text, and a page that leads from the top folder to the first one."""
    if exception is not None or app.builder.name != "html":
        return
    root = app.config.root_doc
    pages = [root, *app.env.toctree_includes[root]]
    for page in pages:
        pages += [one for one in app.env.toctree_includes.get(page, []) if one not in pages]
    listed = [f"- [{app.env.titles[page].astext()}](text/{page}.txt)" for page in pages]
    head = "# rankwise\n\n> PyTorch programs on several ranks.\n\n## Pages\n\n"
    Path(app.outdir, "llms.txt").write_text(head + "\n".join(listed) + "\n")
    Path(app.outdir, "index.html").write_text(_FORWARD.format(app.builder.get_target_uri(root)))
