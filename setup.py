"""Builds the native engine: one extension from the generated `_shim.c` and every other C file beside it."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("kvxfer/native")
NOT_COMPILED_ALONE = {"api.csrc.c"}  # input of the generator, already part of _shim.c

setup(
    ext_modules=[
        Extension(
            "kvxfer.native._shim",
            sources=sorted(str(path) for path in NATIVE.glob("*.c") if path.name not in NOT_COMPILED_ALONE),
            depends=["setup.py", *sorted(str(path) for path in NATIVE.glob("*.h"))],
            include_dirs=[str(NATIVE)],
            extra_compile_args=["-std=gnu11", "-O3", "-g", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
        )
    ],
)
