"""The names searched for in torch's CUDA wheels are the names that the code uses."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import ZipFile

from tests.abi import VERSIONS, Name, Wheels, communicator_names, private_names, used, variables

ROWS = Path(__file__).parents[2] / "bench" / "results" / "abi.json"


def test_committed_rows_have_all_that_is_used_in_every_version() -> None:
    rows = json.loads(ROWS.read_text("utf-8"))
    assert {row["torch"] for row in rows} == set(VERSIONS)
    for version in VERSIONS:
        mine = [row for row in rows if row["torch"] == version]
        assert [Name(row["kind"], row["name"]) for row in mine] == used(), "make abi"
        assert all(row["found"] for row in mine)


def test_a_new_use_is_looked_for() -> None:
    source = """
import torch.distributed as dist
from torch._inductor import secret
def make(x: Any) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options.config.split_share = 1
    return vars(secret)["_inner"], x._new_method()
"""
    assert {
        Name("module", "torch._inductor.secret"),
        Name("module", "torch._inductor.secret._inner"),
        Name("module", "torch.distributed.ProcessGroupNCCL.Options"),
        Name("NCCL option", "split_share"),
        Name("method", "_new_method"),
    } <= set(private_names(source))
    assert set(communicator_names([source])) == {
        Name("method", "_new_method"),
        Name("module", "torch.distributed.ProcessGroupNCCL"),
    }
    assert list(variables('"NCCL_NEW", "TORCH_NCCL_OLD"')) == [
        Name("NCCL variable", "NCCL_NEW"),
        Name("torch variable", "TORCH_NCCL_OLD"),
    ]


def small_wheels(tmp_path: Path) -> Wheels:
    paths = tmp_path / "torch.whl", tmp_path / "nccl.whl"
    stub = """
class ProcessGroupNCCL:
    class Options:
        max_ctas: int
    def abort(self): ...
"""
    with ZipFile(paths[0], "w") as torch:
        torch.writestr("torch/__init__.py", "if True:\n    from .inner import *\n")
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


# Kind, a name that is there, and one that is not.
SOUGHT = [
    ("module", "torch.visible", "torch.hidden"),
    ("module", "torch.distributed.ProcessGroupNCCL.Options", "torch.distributed.Options"),
    ("method", "bound", "unbound"),
    ("text", "hidden", "hid"),
    ("NCCL option", "max_ctas", "min_ctas"),
    ("NCCL variable", "NCCL_OLD", "NCCL_OLDER"),
    ("torch variable", "TORCH_NCCL_OLD", "TORCH_NCCL_NEW"),
]


def test_what_is_there_is_found_and_nothing_else(tmp_path: Path) -> None:
    wheels = small_wheels(tmp_path)
    for kind, there, missing in SOUGHT:
        assert wheels.where(Name(kind, there)) is not None
        assert wheels.where(Name(kind, missing)) is None
