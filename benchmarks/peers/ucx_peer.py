"""UCX through its C interface: runs the program made of `ucx.c` and `native.h`; ``--build`` compiles it, against the
libucx of this environment, into its bin folder.

``cma``: process_vm_readv and _writev; ``shm``: memory that UCX allocates and the initiator maps; ``tcp``.
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from common import LIMIT_S, MISMATCH, arguments, die_with_parent, output

HERE = Path(__file__).parent
PROGRAM = Path(sys.prefix) / "bin" / "kvxfer-bench-ucx"
LIBRARY = Path(sysconfig.get_path("purelib")) / "libucx"
TRANSPORTS = {"cma": "cma,posix,sysv,self", "shm": "posix,sysv,self", "tcp": "tcp,self"}


def build():
    """Compile the program."""
    where = [f"-I{LIBRARY / 'include'}", f"-L{LIBRARY / 'lib'}", f"-Wl,-rpath,{LIBRARY / 'lib'}"]
    command = [*os.environ.get("CC", "cc").split(), "-O2", "-std=gnu11", "-o", str(PROGRAM), str(HERE / "ucx.c")]
    subprocess.run([*command, *where, "-lucp", "-lucs"], check=True, timeout=LIMIT_S)


def main():
    """One measurement."""
    opts = arguments("ucx", tuple(TRANSPORTS), ("read", "write"))
    environment = {**os.environ, "UCX_TLS": TRANSPORTS[opts.variant], "UCX_WARN_UNUSED_ENV_VARS": "n"}
    command = [str(PROGRAM), opts.workload, opts.variant, ",".join(opts.op)]
    command += [f"{name}={value}" for name, value in vars(opts.sizes).items()]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, preexec_fn=die_with_parent
    )
    if done.returncode:
        sys.stderr.write(done.stderr or f"ucx: the program ended with {done.returncode}\n")
        sys.exit(done.returncode if done.returncode in (1, 2, MISMATCH) else 1)
    found = json.loads(done.stdout)
    output(opts, "ucx", found["results"], found["verified"])


if __name__ == "__main__":
    if sys.argv[1:] == ["--build"]:
        build()
    else:
        main()
