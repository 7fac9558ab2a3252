"""Stub libraries for a CUDA build of torch on a machine without a GPU: of gigabytes of libraries, only the names.

Where the registry has no CPU build of a version of torch, pip installs the default build. Its libraries cannot be
loaded without CUDA's, but call none of their functions without a GPU. A stub defines the functions that torch's
libraries refer to; each of them aborts the process, with its name. Needs gcc, and nm and objdump of binutils.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tools.virtualenv import run

# Loaded by torch when a function of them is called: never without a GPU.
LOADED_LATER = ("libcaffe2_nvrtc.so", "libtorch_cuda_linalg.so")
# The beginnings of the names of functions that the interpreter defines.
OF_PYTHON = ("Py", "_Py")

Symbols = dict[str, set[str]]


def forget_cuda(site_packages: Path) -> list[str]:
    """Remove CUDA's packages from torch's metadata, and return requirements of those that torch cannot do without.

    Otherwise pip installs all of them with the next package that requires torch. Torch calls CUDA's runtime, and
    refers to its profiler, when it is imported. A build for the CPU has no such packages.
    """
    (metadata,) = site_packages.glob("torch-*.dist-info/METADATA")
    text = metadata.read_text()
    metadata.write_text(re.sub(r"^Requires-Dist: (cuda-|nvidia-|triton).*\n", "", text, flags=re.MULTILINE))
    toolkit = re.search(r"^Requires-Dist: cuda-toolkit\[.*\]==([\d.]+);", text, re.MULTILINE)
    return [f"cuda-toolkit[cudart,cupti]=={toolkit[1]}"] if toolkit else []


def write_stubs(site_packages: Path) -> list[str]:
    """Write a stub into torch's folder for each library that is needed and not there, and return their names."""
    folder = site_packages / "torch" / "lib"
    libraries = [path for path in sorted(folder.glob("lib*.so*")) if path.name not in LOADED_LATER]
    wheels = list(site_packages.glob("nvidia/*/lib/*.so*"))
    installed = {path.name for path in [*libraries, *wheels]}
    headers = [run(["objdump", "-p", str(path)]) for path in libraries]
    needed = {name for header in headers for name in re.findall(r"^  NEEDED +(\S+)$", header, re.MULTILINE)}
    missing = sorted(name for name in needed - installed if not _is_of_the_system(name))
    if not missing:
        return []
    libraries_of_versions = {version: name for header in headers for version, name in _versions(header)}
    undefined = {symbol for path in libraries for symbol in _symbols("--undefined-only", path)}
    defined = {
        symbol.partition("@")[0] for path in [*libraries, *wheels] for symbol in _symbols("--defined-only", path)
    }
    stubs: dict[str, Symbols] = {name: defaultdict(set) for name in missing}
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        if name in defined or name.startswith(OF_PYTHON):
            continue
        # A symbol without a version is looked for in all libraries, so that the first stub may have it.
        library = libraries_of_versions.get(version, "") if version else missing[0]
        if library in stubs:
            stubs[library][version].add(name)
    for name, symbols in stubs.items():
        _compile(folder / name, symbols)
    return missing


def _is_of_the_system(library: str) -> bool:
    return "/" in run(["gcc", f"-print-file-name={library}"])


def _versions(header: str) -> Iterable[tuple[str, str]]:
    """Return the versions of symbols that a library requires, each with the library that has to define it."""
    library = ""
    for line in header.splitlines():
        if required := re.match(r"  required from (\S+):", line):
            library = required[1]
        elif library and (version := re.match(r"    0x\S+ 0x\S+ \d+ (\S+)", line)):
            yield version[1], library


def _symbols(which: str, library: Path) -> set[str]:
    """Return the symbols of a library that are undefined or defined, as "name@version"; without weak references."""
    lines = (line.split() for line in run(["nm", "-D", which, str(library)]).splitlines())
    return {words[-1].replace("@@", "@") for words in lines if words[-2] not in {"w", "v"}}


def _compile(target: Path, symbols: Symbols) -> None:
    names = sorted(name for names in symbols.values() for name in names)
    body = '{{ fputs("{} is a stub: {} was called\\n", stderr); abort(); }}'.format
    functions = [f"int {name}(void) {body(target.name, name)}" for name in names]
    source = ["#include <stdio.h>", "#include <stdlib.h>", *functions]
    versions = [f"{one} {{ global: {'; '.join(sorted(symbols[one]))}; }};" for one in sorted(symbols) if one]
    with tempfile.TemporaryDirectory() as name:
        code, script = Path(name, "stub.c"), Path(name, "versions")
        code.write_text("\n".join(source) + "\n")
        script.write_text("\n".join(versions) + "\n")
        with_versions = [f"-Wl,--version-script={script}"] if versions else []
        options = ["-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", *with_versions]
        run(["gcc", *options, "-o", str(target), str(code)])
