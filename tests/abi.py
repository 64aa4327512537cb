"""Looks up every private name used here in torch's CUDA wheels and in the NCCL that each requires.

    python -m tests.abi --json bench/results/abi.json        (`make abi`)

Nothing of a wheel is imported or unpacked, so this needs no GPU. Names come from the code that uses
them: `ring_attn/torch_private.py`, calls of communicators in `ring_attn/transport`, and NCCL's
variables anywhere. A method that is found is known to be bound; its behaviour is not checked. This
package itself never calls CUDA's driver: torch and Triton do.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import ring_attn

VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1")
PACKAGE = Path(ring_attn.__file__).parent
PYTHON, LINUX = "3.11", "manylinux_2_28_x86_64"
MEMBERS = (
    "torch/_C/_distributed_c10d.pyi",
    "torch/distributed/device_mesh.py",
    "torch/distributed/distributed_c10d.py",
)


class Name(NamedTuple):
    """A name that belongs to torch or NCCL.

    Attributes:
        kind: "module" for a name of one of torch's modules, with dots; "method" of an object of
            torch's; "text" in torch's sources; "NCCL option"; "NCCL variable"; "torch variable".
        name: the name.
    """

    kind: str
    name: str


# -- what is used


def used() -> list[Name]:
    """All names, in order."""
    found = set(private_names((PACKAGE / "torch_private.py").read_text("utf-8")))
    transport = [path.read_text("utf-8") for path in (PACKAGE / "transport").rglob("*.py")]
    found |= set(communicator_names(transport))
    for path in PACKAGE.rglob("*.py"):
        found |= set(variables(path.read_text("utf-8")))
    return sorted(found)


def private_names(source: str) -> Iterator[Name]:
    """torch's names in a module, as far as its imports show them."""
    tree = ast.parse(source)
    modules = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                yield Name("module", f"{node.module}.{alias.name}")
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            modules |= {x.asname: x.name for x in node.names if x.asname and "torch" in x.name}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    others = {alias.name for node in tree.body if isinstance(node, ast.Import)
              for alias in node.names if "torch" not in alias.name}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            root, *rest = ast.unparse(node).split(".")
            if root in modules:
                yield Name("module", ".".join([modules[root], *rest]))
            elif root not in others:
                if ".config." in ast.unparse(node):
                    yield Name("NCCL option", node.attr)
                if not hasattr(datetime.timedelta, node.attr):
                    yield Name("method", node.attr)
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Call)
            and node.value.args
            and isinstance(node.slice, ast.Constant)
        ):
            # vars(module)["name"]
            owner = modules.get(ast.unparse(node.value.args[0]))
            name = str(node.slice.value)
            yield Name("module", f"{owner}.{name}") if owner else Name("text", name)


def communicator_names(sources: list[str]) -> Iterator[Name]:
    """Methods called on objects without a type: torch has no types for its communicators."""
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    untyped = {
        node.arg if isinstance(node, ast.arg) else ast.unparse(node.target).split(".")[-1]
        for node in nodes
        if isinstance(node, ast.arg | ast.AnnAssign)
        and isinstance(node.annotation, ast.Name)
        and node.annotation.id == "Any"
    }
    for node in nodes:
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).split(".")[-1]
            if owner in untyped:
                yield Name("method", node.attr)
            elif owner == "dist" and "NCCL" in node.attr:
                yield Name("module", f"torch.distributed.{node.attr}")


def variables(source: str) -> Iterator[Name]:
    """Environment variables of NCCL, and of torch's use of NCCL."""
    for torch, name in re.findall(r"\"((?:TORCH_)?)(NCCL_[A-Z_]+)\"", source):
        yield Name("torch variable" if torch else "NCCL variable", torch + name)


# -- what is there


class Wheels:
    """A torch wheel and the wheel of its NCCL."""

    def __init__(self, torch: Path, nccl: Path) -> None:
        self._torch, self._nccl = ZipFile(torch), ZipFile(nccl)
        self._files = set(self._torch.namelist())

    def where(self, name: Name) -> str | None:
        """The file that has the name; None if no file has it."""
        match name.kind:
            case "module":
                return self._in_modules(name.name.split("."))
            case "method":
                return self._method(name.name)
            case "text":
                return self._text(name.name)
            case "NCCL option":
                return self._option(name.name)
            case "NCCL variable":
                return self._in_library(self._nccl, "nvidia/nccl/lib/libnccl.so.2", name.name)
            case "torch variable":
                return self._in_library(self._torch, "torch/lib/libtorch_cuda.so", name.name)
        raise ValueError(name.kind)

    def _in_modules(self, parts: list[str]) -> str | None:
        """The file of the longest prefix that is a module, if it defines the rest of the name."""
        for length in range(len(parts), 0, -1):
            file = self._module(parts[:length])
            if file is None:
                continue
            if length == len(parts):
                return file
            if not self._defines(file, parts[length], frozenset()):
                return None
            # The remaining parts are members of a class.
            rest = [self._method(part) for part in parts[length + 1 :]]
            return None if None in rest else file
        return None

    def _module(self, parts: list[str]) -> str | None:
        path = "/".join(parts)
        names = [f"{path}{end}" for end in (".py", ".pyi", "/__init__.py", "/__init__.pyi")]
        return next((name for name in names if name in self._files), None)

    def _defines(self, file: str, name: str, seen: frozenset[str]) -> bool:
        names, stars = self._top_level(file)
        if name in names:
            return True
        package = file.rsplit("/", 1)[0].split("/")
        for star in stars - seen:
            module = package + star[1:].split(".") if star.startswith(".") else star.split(".")
            other = self._module(module)
            if other and self._defines(other, name, seen | {star}):
                return True
        return False

    @cache  # noqa: B019
    def _top_level(self, file: str) -> tuple[set[str], set[str]]:
        """Names that a module defines or imports, and modules that it star-imports."""
        names, stars = set(), set()
        left: list[ast.AST] = [ast.parse(self._torch.read(file))]
        while left:
            node = left.pop()
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
                if "*" in names:
                    stars.add("." * node.level + (node.module or ""))
            elif isinstance(node, ast.Import):
                names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {ast.unparse(target) for target in targets}
            else:
                left += ast.iter_child_nodes(node)
            names.discard("*")
        return names, stars

    def _method(self, name: str) -> str | None:
        pattern = re.compile(rf"^ +((def|class) {name}\b|{name}: )", re.MULTILINE)
        for file in MEMBERS:
            if pattern.search(self._torch.read(file).decode()):
                return file
        return self._in_library(self._torch, "torch/lib/libtorch_python.so", name)

    def _text(self, name: str) -> str | None:
        word = re.compile(rb"\b" + name.encode() + rb"\b")
        sources = sorted(file for file in self._files if file.endswith(".py"))
        return next((file for file in sources if word.search(self._torch.read(file))), None)

    def _option(self, name: str) -> str | None:
        header = "nvidia/nccl/include/nccl.h"
        struct = re.search(rb"struct ncclConfig.*?\{(.*?)\}", self._nccl.read(header), re.DOTALL)
        fields = re.findall(rb"(\w+);", struct[1]) if struct else []
        wanted = name.replace("_", "").encode()
        return header if wanted in [field.lower() for field in fields] else None

    def _in_library(self, wheel: ZipFile, file: str, name: str) -> str | None:
        """The library if one of its strings ends with the name: linkers merge equal string ends."""
        wanted, tail = name.encode() + b"\0", b""
        with wheel.open(file) as library:
            while block := library.read(1 << 24):
                if wanted in tail + block:
                    return file
                tail = block[-len(wanted) :]
        return None


def download(requirement: str, folder: Path) -> Path:
    """Downloads a wheel by pip; `===` in the requirement excludes builds with a local label."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement]
    command += ["--only-binary", ":all:", "--python-version", PYTHON, "--platform", LINUX]
    command += ["--platform", LINUX.replace("28", "18"), "--dest", str(folder)]
    subprocess.run(command, check=True)
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


def nccl_of(torch: Path) -> str:
    """The NCCL requirement of a torch wheel."""
    with ZipFile(torch) as wheel:
        file = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        found = re.search(r"Requires-Dist: (nvidia-nccl-\w+)==([\d.]+)", wheel.read(file).decode())
    if found is None:
        raise RuntimeError(f"{torch.name} asks for no NCCL: it is not a CUDA wheel")
    return f"{found[1]}==={found[2]}"


def rows_of(version: str) -> list[dict[str, str | None]]:
    """Finds the names in one version of torch; its wheels are removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        torch = download(f"torch==={version}", Path(folder))
        requirement = nccl_of(torch)
        wheels = Wheels(torch, download(requirement, Path(folder)))
        both = {"torch": version, "nccl": requirement.split("=")[-1]}
        return [{**both, **name._asdict(), "found": wheels.where(name)} for name in used()]


def main() -> None:
    """Prints what is missing, and writes all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    rows = [row for version in args.versions for row in rows_of(version)]
    lines = ",\n".join(json.dumps(row) for row in rows)
    args.json.write_text(f"[\n{lines}\n]\n", "utf-8")
    missing = [row for row in rows if row["found"] is None]
    print(f"{len(rows)} rows, {len(missing)} missing", *missing, sep="\n")
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
