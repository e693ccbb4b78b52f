"""Energy-aware auto-scheduling for Apache TVM."""

from tvm_energy.version import __version__

__all__ = ["__version__"]
