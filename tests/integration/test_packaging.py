"""The package works from a wheel, an sdist, an editable install and the uninstalled sources.

Everything is built from a copy of the sources and installed into a new environment, without the
network. The new environment sees the packages of the running one, and a stand-in for Hugging Face's
package `kernels`, which our folder `kernels` must not shadow.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "ring_attn_cli.py"]
SOURCES = [*FILES, "ring_attn", "kernels", "bench"]


def run(*command: str | Path, cwd: Path) -> str:
    """The stdout of a command that must succeed, without PYTHONPATH, which names the checkout."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1000
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python_files(root: Path) -> set[str]:
    """The Python files that are installed from a root; follows links."""
    return {"ring_attn_cli.py"} | {
        str(Path(folder, name).relative_to(root))
        for folder, _, names in os.walk(root / "ring_attn", followlinks=True)
        for name in names
        if name.endswith(".py")
    }


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with links kept, so that a build leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("sources")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="session")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the sdist, and the wheel from the sdist, as `make wheel` does."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=sources)
    (wheel,) = folder.glob("*.whl")
    return wheel


PROBE = """
import json
from importlib.util import find_spec
from pathlib import Path
import kernels
import ring_attn
found = {"ring_attn": ring_attn.__file__, "kernels": kernels.__file__}
for part in ("kernels", "bench"):
    for folder in __import__(f"ring_attn.{part}", fromlist=["__path__"]).__path__:
        for file in Path(folder).glob("*.py"):
            name = f"ring_attn.{part}.{file.stem}"
            found[name] = find_spec(name).origin
print(json.dumps(found))
"""


@dataclass
class Environment:
    """A bare virtual environment; its own packages come before those of the running one."""

    bin: Path
    site_packages: Path

    def install(self, *what: str | Path) -> None:
        pip = [self.bin / "python", "-m", "pip", "install", "--quiet", "--no-index"]
        flags = ["--no-deps", "--no-build-isolation", "--ignore-installed"]
        run(*pip, *flags, *what, cwd=self.site_packages)

    def check(self, sources: Path, cwd: Path, home: Path) -> None:
        """Checks that all our modules lie under `home`, and that `kernels` is Hugging Face's."""
        found = json.loads(run(self.bin / "python", "-c", PROBE, cwd=cwd))
        assert found.pop("kernels") == str(self.site_packages / "kernels" / "__init__.py")
        linked = ("ring_attn/kernels/", "ring_attn/bench/")
        expected = {name for name in python_files(sources) if name.startswith(linked)}
        modules = {name.removesuffix(".py").replace("/", ".") for name in expected}
        assert set(found) == modules | {"ring_attn"}
        for name, path in found.items():
            assert Path(path).is_relative_to(home), f"{name} was imported from {path}"


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    venv.create(tmp_path / "venv", symlinks=True)
    site_packages = tmp_path / "venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    # Folders named in a .pth file are searched, but their own .pth files are not read, so the
    # editable install of this checkout is not found.
    parents = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "parent.pth").write_text("\n".join(sorted(parents)))
    (site_packages / "kernels").mkdir()
    (site_packages / "kernels" / "__init__.py").touch()
    return Environment(tmp_path / "venv" / "bin", site_packages)


def test_wheel_holds_the_package_and_nothing_else(sources: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if not name.endswith("/")]
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        info = metadata.rpartition("/")[0]
        fields = Parser().parsestr(file.read(metadata).decode())
        licence = file.read(f"{info}/licenses/LICENSE")
    assert {name for name in names if name.endswith(".py")} == python_files(sources)
    others = {name for name in names if not name.endswith(".py") and not name.startswith(info)}
    assert others == {"ring_attn/py.typed"}
    extras = {
        "flash",
        "hf",
        "diffusers",
        "plot",
        "trainer",
        "docs",
        "release",
        "test",
        "dev",
        "audit",
    }
    assert extras == set(fields.get_all("Provides-Extra"))
    assert licence == (ROOT / "LICENSE").read_bytes()


def test_works_uninstalled_from_the_root(sources: Path, environment: Environment) -> None:
    environment.check(sources, cwd=sources, home=sources)


@pytest.mark.slow
def test_works_from_a_wheel(
    sources: Path, wheel: Path, environment: Environment, tmp_path: Path
) -> None:
    environment.install(wheel)
    environment.check(sources, cwd=tmp_path, home=environment.site_packages)
    usage = run(environment.bin / "ring-attn", "--help", cwd=tmp_path)
    assert "usage: ring-attn" in usage.lower()


# With --warn-unused-ignores each ignored mistake must be found; without py.typed none would be.
TYPED = """
import torch
from torch import Tensor
import ring_attn
from ring_attn import ContextParallel, Mask, SequenceLayout, masks

def attention(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
    out, lse = ring_attn.ring_attention(q, k, v, causal=True, layout=layout, return_lse=True)
    rows: tuple[int, ...] = layout.shard_lens
    mask: Mask = masks.chunked(layout.seqlen, 8) & masks.causal(layout.seqlen)
    style = ContextParallel(strategy="ring", layout=layout)
    part: dict[str, Tensor] = ring_attn.shard_batch({"input_ids": q}, layout, 0)
    ring_attn.ring_attention(q, k, v, causl=True)  # type: ignore[call-overload]
    ring_attn.ring_attention(q, k, v, layout=3)  # type: ignore[call-overload]
    layout.shard_lens.append(1)  # type: ignore[attr-defined]
    ring_attn.shard_batch([q], layout, 0)  # type: ignore[arg-type]
    ring_attn.integrations.transformers.register(layout="zigzag").unregister()
    ring_attn.testing.check("out", out, lse, out)
    ring_attn.nonsense()  # type: ignore[attr-defined]
    return ring_attn.ring_attention(q, k, v, mask=mask, layout="zigzag")
"""


@pytest.mark.slow
def test_the_types_of_a_users_file_are_checked(
    wheel: Path, environment: Environment, tmp_path: Path
) -> None:
    environment.install(wheel)
    (tmp_path / "user.py").write_text(TYPED)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"]
    run(*mypy, "--python-executable", environment.bin / "python", "user.py", cwd=tmp_path)


@pytest.mark.slow
def test_works_as_an_editable_install(
    sources: Path, environment: Environment, tmp_path: Path
) -> None:
    editable = tmp_path / "sources"
    shutil.copytree(sources, editable, symlinks=True)
    environment.install("--editable", editable)
    (editable / "kernels" / "new_kernel.py").touch()
    environment.check(editable, cwd=tmp_path, home=editable)


def test_wheel_from_the_tree_equals_the_wheel_from_the_sdist(
    sources: Path, wheel: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "sources"
    shutil.copytree(sources, copy, symlinks=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, cwd=copy)
    (direct,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(direct) as tree, zipfile.ZipFile(wheel) as sdist:
        assert sorted(tree.namelist()) == sorted(sdist.namelist())
        for name in tree.namelist():
            assert tree.read(name) == sdist.read(name), name
