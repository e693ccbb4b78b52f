"""``python -m tvm_energy.cli``."""

from tvm_energy.cli import main

main()
