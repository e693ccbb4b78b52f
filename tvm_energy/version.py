"""The version of tvm_energy, and nothing else."""

__version__ = "0.1.0"
