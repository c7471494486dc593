"""Says in one sentence what this machine lacks to build kvxfer, before pip or the compiler say it in fifty lines.

Runs with the interpreter that will own the virtual environment, also with one that is far too old: plain syntax only.
"""

import os
import shutil
import sys
import sysconfig

PYTHON_MIN = (3, 11)


def problems():
    """Yield one sentence for each thing that is missing."""
    if sys.version_info < PYTHON_MIN:
        yield (
            f"kvxfer needs Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer, but {sys.executable} is "
            f"{sys.version_info[0]}.{sys.version_info[1]}. Name another one: make PYTHON=/path/to/python3"
        )
        return
    if sys.platform != "linux":
        yield f"kvxfer's native engine needs Linux (memfd, eventfd, epoll); this is {sys.platform}."
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        yield f"{sys.executable} cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        yield f"No C compiler: {compiler!r} is not on the PATH. On Debian and Ubuntu: apt-get install gcc libc6-dev"
    plus = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]
    if shutil.which(plus) is None:
        yield f"No C++ compiler: {plus!r} is not on the PATH. On Debian and Ubuntu: apt-get install g++"
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        yield f"Python's C headers are missing ({header}). On Debian and Ubuntu: apt-get install python3-dev"


def main():
    found = list(problems())
    for sentence in found:
        print("kvxfer: " + sentence, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
