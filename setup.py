"""The list of packages: every folder below ring_attn that holds Python.

All else is in pyproject.toml. This is computed because no setting there finds it:
`ring_attn/kernels` and `ring_attn/bench` are links to folders that must not have an `__init__.py`,
or they would shadow other packages called `kernels`. `ring_attn_cli` lies outside of the package:
the command's help comes without the package's `__init__`.
"""

from glob import glob
from os.path import dirname
from pathlib import Path

from setuptools import setup

folders = {dirname(file) for file in glob("ring_attn/**/*.py", recursive=True)}
packages = sorted(".".join(Path(folder).parts) for folder in folders)
setup(packages=packages, py_modules=["ring_attn_cli"])
