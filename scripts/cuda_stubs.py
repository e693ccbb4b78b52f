"""Make stand-ins for NVIDIA's libraries, so that a CUDA build of TVM loads without a driver.

Usage: cuda_stubs.py LIBTVM_SO OUT_DIR; needs gcc (or cc) and nm. Every function answers that there is no
device (100 in CUDA's numbering). Functions are taken from what the library leaves undefined.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys

LIBRARIES = {
    "libcudart.so.12": r"cuda[A-Z]",
    "libcuda.so.1": r"cu[A-Z]",
    "libnvrtc.so.12": r"nvrtc[A-Z]",
}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or shutil.which("nm") is None:
        sys.exit("a C compiler and nm are needed; install gcc and binutils")
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", sys.argv[1]], text=True, capture_output=True, check=True
    ).stdout
    names = sorted(set(re.findall(r" U (\w+)", symbols)))
    for library, pattern in LIBRARIES.items():
        source = folder / f"{library}.c"
        source.write_text("".join(stub(name) for name in names if re.match(pattern, name)))
        # CUDA's runtime versions its symbols with its own name; the driver does not.
        versions = folder / f"{library}.map"
        versions.write_text(f"{library} {{ global: *; }};\n")
        options = [] if library == "libcuda.so.1" else [f"-Wl,--version-script={versions}"]
        output = ["-o", str(folder / library), str(source)]
        subprocess.run(
            [compiler, "-w", "-shared", "-fPIC", f"-Wl,-soname,{library}", *options, *output],
            check=True,
        )


def stub(name: str) -> str:
    if name.endswith("GetErrorString"):
        return f'const char* {name}(int e) {{ return "no CUDA on this machine"; }}\n'
    if name == "cuGetErrorName":
        return f'int {name}(int e, const char** s) {{ *s = "NO_CUDA"; return 0; }}\n'
    if name == "cudaGetDeviceCount":
        return f"int {name}(int* count) {{ *count = 0; return 100; }}\n"
    return f"int {name}() {{ return 100; }}\n"


if __name__ == "__main__":
    main()
