"""Builds the native engine: one extension from the generated `_shim.c` and every other C and C++ file beside it.

One C++ file is part of it (the library for Ascend cards has no C interface), so g++ links, and libstdc++ is a shared
library as everywhere: exceptions must unwind through the vendor's code and ours.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("kvxfer/native")
NOT_COMPILED_ALONE = {"api.csrc.c"}  # input of the generator, already part of _shim.c
STANDARDS = {".c": "-std=gnu11", ".cc": "-std=c++17"}


class BuildNative(build_ext):
    """Each file by the standard of its language: one list of flags cannot serve both compilers."""

    def build_extension(self, extension: Extension) -> None:
        compile_one = self.compiler._compile

        def with_standard(obj: str, src: str, ext: str, cc_args: list, extra: list, pp_opts: list) -> None:
            compile_one(obj, src, ext, cc_args, [STANDARDS[ext], *extra], pp_opts)

        self.compiler._compile = with_standard
        try:
            super().build_extension(extension)
        finally:
            self.compiler._compile = compile_one


setup(
    cmdclass={"build_ext": BuildNative},
    ext_modules=[
        Extension(
            "kvxfer.native._shim",
            sources=sorted(
                str(path)
                for suffix in STANDARDS
                for path in NATIVE.glob(f"*{suffix}")
                if path.name not in NOT_COMPILED_ALONE
            ),
            depends=["setup.py", *sorted(str(path) for pattern in ("*.h", "*.map") for path in NATIVE.glob(pattern))],
            include_dirs=[str(NATIVE)],
            extra_compile_args=["-O3", "-g", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"],
            extra_link_args=["-pthread", f"-Wl,--version-script={NATIVE}/_shim.map"],
        )
    ],
)
