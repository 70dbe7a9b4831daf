"""The version, as the package's metadata gives it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("sweepgrad")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"
