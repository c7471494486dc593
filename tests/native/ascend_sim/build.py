"""Compiles the simulated CANN libraries: a directory per toolkit version, string ABI, compiler and text of sources.

``build("9.1", abi=1)`` gives the directory that ``KVXFER_CANN_LIBDIR`` is to name; a second call finds it made. Several
processes may ask at once: one builds under a file lock into a directory that is then renamed. ``CXX`` chooses the
compiler (also a cross compiler: its name and version are part of the directory's).

    python -m tests.native.ascend_sim.build --variant 8.5 --abi 0      prints the directory
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE.parent / "build" / "ascend_sim"
VARIANTS = ("8.5", "9.0", "9.1")
FLAGS = (
    "-std=c++17 -O1 -g1 -fPIC -pthread -fvisibility=hidden -fno-strict-aliasing "
    "-Wall -Wextra -Werror -Wshadow -Wconversion "
)


class NoCompilerError(RuntimeError):
    """There is no C++ compiler here."""


# What came with 9.0 and tells it from 8.5: the C interface, of which one name is enough.
HIXL_9_0 = ("HixlCSServerCreate",)
# What only 9.1 and later have; the linker hides it for the others.
ACL_NEW = ("aclrtMemGetAddressRange",)
HIXL_NEW = (
    "_ZN4hixl4Hixl12ConnectAsyncERKN2ge12AscendStringEi",
    "_ZN4hixl4Hixl15DisconnectAsyncERKN2ge12AscendStringEi",
    "_ZN4hixl4Hixl21GetAsyncConnectStatusERKN2ge12AscendStringERNS_18AsyncConnectStatusE",
    "_ZN4hixl4Hixl21GetAsyncConnectStatusERSt3mapIN2ge12AscendStringENS_18AsyncConnectStatusESt4lessIS3_ESaISt4pair"
    "IKS3_S4_EEE",
    "_ZN4hixl4Hixl17GetTransferStatusERKNS_21GetTransferStatusArgsERSt6vectorINS_14TransferResultESaIS5_EE",
    "_ZN4hixl4Hixl13GetCapabilityENS_11FeatureTypeERi",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library to build: sources, what it may export (patterns of the linker; `newer`: from 9.1 on), what it needs."""

    name: str
    sources: tuple[str, ...]
    exports: tuple[str, ...]
    newer: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def object(self) -> str:
        return self.sources[0].replace(".cc", ".o")


EMPTY = ("empty.cc",)
LIBRARIES = (
    Library(
        name="libacl_rt.so",
        sources=("settings.cc", "state.cc", "memory.cc", "acl_device.cc", "acl_memory.cc", "acl_stream.cc"),
        exports=("acl*", "kvxsim_*"),
        newer=ACL_NEW,
    ),
    Library(
        name="libmetadef.so",
        sources=("metadef.cc",),
        exports=("_ZN2ge12AscendStringC1*", "_ZNK2ge12AscendString*"),
    ),
    Library(name="libhcomm.so", sources=EMPTY, exports=("kvxsim_placeholder",)),
    Library(name="liberror_manager.so", sources=EMPTY, exports=("kvxsim_placeholder",)),
    Library(
        name="libcann_hixl.so",
        sources=("hixl.cc", "engine.cc", "server.cc", "transfer.cc", "wire.cc"),
        exports=("_ZN4hixl4HixlC1Ev", "_ZN4hixl4HixlD1Ev", "_ZN4hixl4Hixl[0-9]*", *HIXL_9_0),
        newer=HIXL_NEW,
        needs=("libacl_rt.so", "libmetadef.so", "libhcomm.so", "liberror_manager.so"),
    ),
)


def sources() -> list[Path]:
    """What decides whether something is built again."""
    return sorted(path for path in HERE.iterdir() if path.suffix in (".cc", ".h") or path.name == "build.py")


@cache
def compiler() -> tuple[str, str]:
    """The compiler and what it says of itself. Raises NoCompilerError with what to install."""
    named = os.environ.get("CXX", "")
    for candidate in [named] if named else ["g++", "clang++"]:
        if shutil.which(candidate):
            said = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=True)
            machine = subprocess.run([candidate, "-dumpmachine"], capture_output=True, text=True, check=True)
            return candidate, said.stdout.splitlines()[0] + " " + machine.stdout.strip()
    raise NoCompilerError(
        f"no C++ compiler ({named or 'g++ or clang++'}): the simulated CANN libraries cannot be built. "
        "Install one (Debian, Ubuntu: apt-get install g++) or name one in CXX."
    )


def flags(abi: int, sanitize: str | None) -> list[str]:
    return [*FLAGS.split(), f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *([f"-fsanitize={sanitize}"] if sanitize else [])]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def compile_objects(directory: Path, options: list[str]) -> None:
    """An object for each library, of all its sources at once: what costs time is the standard library's headers."""
    for library in LIBRARIES:
        whole = directory / library.object.replace(".o", "-all.cc")
        whole.write_text("".join(f'#include "{HERE / source}"\n' for source in library.sources))
        if not (directory / library.object).exists():
            run([compiler()[0], *options, "-c", str(whole), "-o", str(directory / library.object)])


def link_libraries(directory: Path, objects: Path, variant: str, options: list[str]) -> None:
    major, minor = variant.split(".")
    for library in LIBRARIES:
        exports = [name for name in library.exports if variant != "8.5" or name not in HIXL_9_0]
        hidden = (*(library.newer if variant != "9.1" else ()), "*")
        script = directory / f"{library.name}.map"
        script.write_text(f"{{ global: {'; '.join(exports)}; local: {'; '.join(hidden)}; }};\n")
        command = [compiler()[0], *options, "-shared", str(objects / library.object)]
        if library.name == "libacl_rt.so":
            command += [f"-DKVXSIM_VERSION_MAJOR={major}", f"-DKVXSIM_VERSION_MINOR={minor}", str(HERE / "version.cc")]
        command += [
            "-o",
            str(directory / library.name),
            f"-Wl,-soname,{library.name}",
            f"-Wl,--version-script,{script}",
        ]
        command += [f"-L{directory}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
        command += [f"-l:{name}" for name in library.needs]
        run(command)
        script.unlink()
    (directory / "libascendcl.so").symlink_to("libacl_rt.so")


def made(family: Path, options: list[str], work: Callable[[Path], None], *also: object) -> Path:
    """The directory in `family` for these options and sources; `work` fills it when it is not there."""
    digest = hashlib.sha256(repr((options, compiler(), also)).encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    target = family / digest.hexdigest()[:16]
    if target.is_dir():
        return target
    family.mkdir(parents=True, exist_ok=True)
    with (family / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        fresh = Path(tempfile.mkdtemp(dir=family, prefix=".work-"))
        try:
            work(fresh)
            fresh.rename(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return target


def build(variant: str = "9.1", abi: int = 1, sanitize: str | None = None) -> Path:
    """The directory with the libraries, built if need be. ``sanitize``: what -fsanitize= takes."""
    if variant not in VARIANTS or abi not in (0, 1):
        raise ValueError(f"variant {variant!r} is not one of {VARIANTS}, or abi {abi!r} not 0 or 1")
    options = flags(abi, sanitize)
    suffix = f"abi{abi}" + (f"-{sanitize.replace(',', '-')}" if sanitize else "")
    objects = made(BUILT / f"objects-{suffix}", options, lambda work: compile_objects(work, options))
    return made(
        BUILT / f"{variant}-{suffix}", options, lambda work: link_libraries(work, objects, variant, options), variant
    )


def build_driver(libraries: Path, abi: int = 1, sanitize: str | None = None) -> Path:
    """The test's program; its string ABI may differ from the libraries'. It is linked to those of 9.1 and finds them by
    LD_LIBRARY_PATH, so it runs with older ones as long as it asks nothing of them that they do not have."""
    options = [*flags(abi, sanitize), "-O0"]
    names = [f"-l:{library.name}" for library in LIBRARIES]

    def work(directory: Path) -> None:
        command = [compiler()[0], *options, str(HERE / "driver.cc"), "-o", str(directory / "driver")]
        run([*command, f"-L{libraries}", "-Wl,-z,lazy", *names])

    return made(BUILT / f"driver-abi{abi}", options, work) / "driver"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="9.1")
    parser.add_argument("--abi", type=int, choices=(0, 1), default=1)
    parser.add_argument("--sanitize", help="what -fsanitize= takes, for example address or thread")
    arguments = parser.parse_args()
    print(build(arguments.variant, arguments.abi, arguments.sanitize))


if __name__ == "__main__":
    main()
