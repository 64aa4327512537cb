"""The names searched for in torch's CUDA wheels are the names that the code uses."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import ZipFile

from tests.abi import VERSIONS, Name, Wheels, used

ROWS = Path(__file__).parents[2] / "bench" / "results" / "abi.json"


def test_committed_rows_have_all_that_is_used_in_every_version() -> None:
    rows = json.loads(ROWS.read_text("utf-8"))
    assert {row["torch"] for row in rows} == set(VERSIONS)
    for version in VERSIONS:
        mine = [row for row in rows if row["torch"] == version]
        assert [Name(row["kind"], row["name"]) for row in mine] == used(), "make abi"
        assert all(row["found"] for row in mine)


def stand_ins(tmp_path: Path) -> Wheels:
    paths = tmp_path / "torch.whl", tmp_path / "nccl.whl"
    stub = """
class ProcessGroupNCCL:
    class Options:
        max_ctas: int
    def abort(self): ...
"""
    with ZipFile(paths[0], "w") as torch:
        torch.writestr("torch/__init__.py", "from .inner import visible\n")
        torch.writestr("torch/inner.py", "def visible():\n    def hidden(): ...\n")
        torch.writestr("torch/_C/_distributed_c10d.pyi", stub)
        torch.writestr("torch/distributed/__init__.py", "from torch._C import ProcessGroupNCCL\n")
        torch.writestr("torch/distributed/device_mesh.py", "")
        torch.writestr("torch/distributed/distributed_c10d.py", "")
        torch.writestr("torch/lib/libtorch_python.so", b"\0" * 5 + b"bound\0unboundly\0")
        torch.writestr("torch/lib/libtorch_cuda.so", b"\0TORCH_NCCL_OLD\0")
    with ZipFile(paths[1], "w") as nccl:
        nccl.writestr("nvidia/nccl/include/nccl.h", "struct ncclConfig_v1 {\n int maxCTAs;\n} x;")
        nccl.writestr("nvidia/nccl/lib/libnccl.so.2", b"\0NCCL_OLD\0NCCL_OLDER_ONES\0")
    return Wheels(*paths)


def test_what_is_there_is_found_and_nothing_else(tmp_path: Path) -> None:
    wheels = stand_ins(tmp_path)
    for kind, there, missing in (
        ("module", "torch.visible", "torch.hidden"),
        ("module", "torch.inner", "torch.outer"),
        ("module", "torch.distributed.ProcessGroupNCCL.Options", "torch.distributed.Options"),
        ("method", "abort", "shutdown"),
        ("method", "bound", "unbound"),
        ("text", "hidden", "hid"),
        ("NCCL option", "max_ctas", "min_ctas"),
        ("NCCL variable", "NCCL_OLD", "NCCL_OLDER"),
        ("torch variable", "TORCH_NCCL_OLD", "TORCH_NCCL_NEW"),
    ):
        assert wheels.where(Name(kind, there)) is not None, there
        assert wheels.where(Name(kind, missing)) is None, missing
