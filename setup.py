"""Builds the native engine: one extension from the binding that cffi generates and every C and C++ file of the engine.

The binding is written to `build/shim/` at each build, from the declarations beside `kvxfer/native/build_shim.py`. One
C++ file is part of the engine (the library for Ascend cards has no C interface), so g++ links, and libstdc++ is a
shared library as everywhere: exceptions must unwind through the vendor's code and ours.
"""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("kvxfer/native")
BINDING = Path("build/shim/_shim.c")
NOT_COMPILED_ALONE = {"api.csrc.c"}  # input of the generator, already part of the binding
# What an overflow runs into, if there is one; tests/test_build.py reads the result.
HARDENED = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
HARDENED_LINK = ["-Wl,-z,relro,-z,now,-z,noexecstack"]
STANDARDS = {".c": "-std=gnu11", ".cc": "-std=c++17"}


def everywhere(*patterns: str) -> list[str]:
    """The engine's files with such names, in whatever folder."""
    return sorted(str(path) for pattern in patterns for path in NATIVE.rglob(pattern))


class BuildNative(build_ext):
    """Generates the binding, and compiles each file by the standard of its language: one list of flags cannot serve
    both compilers.
    """

    def run(self) -> None:
        runpy.run_path(str(NATIVE / "build_shim.py"))["write"](BINDING)
        super().run()

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
            sources=[
                str(BINDING),
                *(path for path in everywhere("*.c", "*.cc") if Path(path).name not in NOT_COMPILED_ALONE),
            ],
            depends=["setup.py", *everywhere("*.h", "*.map")],
            include_dirs=[str(NATIVE)],
            extra_compile_args=["-O3", "-g", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", *HARDENED],
            extra_link_args=["-pthread", *HARDENED_LINK, f"-Wl,--version-script={NATIVE}/_shim.map"],
        )
    ],
)
