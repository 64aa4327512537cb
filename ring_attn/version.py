"""The version, without the package around it; and versions of other packages."""

from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
