"""Tiny stand-ins for the five CANN libraries, compiled on the spot: what is missing, broken or throws is the point.

They are not the simulator (`ascend_sim`): each function does nothing and answers 0, unless a test says otherwise. The
names are read from nowhere else in the tree, so they also say what the loader must find.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STRING = "RKN2ge12AscendStringE"
# Letter by letter what the vendor's library exports.
HIXL = {
    "C1Ev": "_ZN4hixl4HixlC1Ev",
    "D1Ev": "_ZN4hixl4HixlD1Ev",
    "Finalize": "_ZN4hixl4Hixl8FinalizeEv",
    "Initialize": "_ZN4hixl4Hixl10InitializeERKN2ge12AscendStringERKSt3mapIS2_S2_St4lessIS2_ESaISt4pairIS3_S2_EEE",
    "RegisterMem": "_ZN4hixl4Hixl11RegisterMemERKNS_7MemDescENS_7MemTypeERPv",
    "DeregisterMem": "_ZN4hixl4Hixl13DeregisterMemEPv",
    "Connect": "_ZN4hixl4Hixl7ConnectERKN2ge12AscendStringEi",
    "Disconnect": "_ZN4hixl4Hixl10DisconnectERKN2ge12AscendStringEi",
    "TransferSync": "_ZN4hixl4Hixl12TransferSyncERKN2ge12AscendStringENS_10TransferOpE"
    "RKSt6vectorINS_14TransferOpDescESaIS7_EEi",
    "TransferAsync": "_ZN4hixl4Hixl13TransferAsyncERKN2ge12AscendStringENS_10TransferOpE"
    "RKSt6vectorINS_14TransferOpDescESaIS7_EERKNS_12TransferArgsERPv",
    "GetTransferStatus": "_ZN4hixl4Hixl17GetTransferStatusERKPvRNS_14TransferStatusE",
    "SendNotify": "_ZN4hixl4Hixl10SendNotifyERKN2ge12AscendStringERKNS_10NotifyDescEi",
    "GetNotifies": "_ZN4hixl4Hixl11GetNotifiesERSt6vectorINS_10NotifyDescESaIS2_EE",
}
HIXL_9_1 = {
    "ConnectAsync": "_ZN4hixl4Hixl12ConnectAsyncERKN2ge12AscendStringEi",
    "DisconnectAsync": "_ZN4hixl4Hixl15DisconnectAsyncERKN2ge12AscendStringEi",
    "GetAsyncConnectStatus": "_ZN4hixl4Hixl21GetAsyncConnectStatusERKN2ge12AscendStringERNS_18AsyncConnectStatusE",
    "GetAsyncConnectStatuses": "_ZN4hixl4Hixl21GetAsyncConnectStatusERSt3mapIN2ge12AscendStringE"
    "NS_18AsyncConnectStatusESt4lessIS3_ESaISt4pairIKS3_S4_EEE",
    "GetTransferStatuses": "_ZN4hixl4Hixl17GetTransferStatusERKNS_21GetTransferStatusArgsE"
    "RSt6vectorINS_14TransferResultESaIS5_EE",
    "GetCapability": "_ZN4hixl4Hixl13GetCapabilityENS_11FeatureTypeERi",
}
STRINGS = {
    "C1EPKc": "_ZN2ge12AscendStringC1EPKc",
    "GetString": "_ZNK2ge12AscendString9GetStringEv",
    "less": "_ZNK2ge12AscendStringltERKS0_",
}
ACL = (
    *("aclInit", "aclrtGetSocName", "aclrtGetDeviceCount", "aclrtSetDevice", "aclrtGetCurrentContext"),
    *("aclrtSetCurrentContext", "aclrtGetMemInfo", "aclrtMalloc", "aclrtFree", "aclrtMallocHost", "aclrtFreeHost"),
    *("aclrtMemcpy", "aclrtMemcpyAsync", "aclrtCreateStream", "aclrtDestroyStream", "aclrtStreamQuery"),
    "aclrtSynchronizeStream",
)
# What must do more than answer 0 for a probe to end well: bodies in C.
ACL_BODIES = {
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Fake910"; }',
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 2; return 0; }",
    "aclrtGetCurrentContext": "static int context; int aclrtGetCurrentContext(void **now)"
    " { *now = &context; return 0; }",
}


def build(source: str, target: Path, *flags: str, plus: bool = False) -> None:
    """Compile one library; its soname is its file name."""
    compiler = shutil.which("g++" if plus else "gcc") or shutil.which("c++" if plus else "cc") or "cc"
    command = [compiler, "-x", "c++" if plus else "c", "-w", "-shared", "-fPIC", f"-Wl,-soname,{target.name}"]
    command += ["-Wl,-rpath,$ORIGIN", "-o", str(target), "-", "-Wl,--no-as-needed", *flags]
    subprocess.run(command, input=source, text=True, check=True)


def functions(names: Sequence[str], bodies: Mapping[str, str] | None = None) -> str:
    """C source that defines these symbols."""
    bodies = bodies or {}
    return "\n".join(bodies.get(name, f"int {name}(void) {{ return 0; }}") for name in names)


def toolkit(
    folder: Path,
    *,
    acl: Sequence[str] = ACL,
    acl_bodies: Mapping[str, str] | None = None,
    acl_name: str = "libacl_rt.so",
    meta_name: str = "libmetadef.so",
    hixl: Sequence[str] = tuple(HIXL.values()),
    hixl_source: str | None = None,
    strings: Sequence[str] = tuple(STRINGS.values()),
    weak: Sequence[str] = ("libhcomm.so", "liberror_manager.so"),
) -> Path:
    """A directory with the five libraries (less what a test leaves out). ``hixl_source`` is C++."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in weak:
        build("", folder / name)
    build(functions(acl, ACL_BODIES | dict(acl_bodies or {})), folder / acl_name)
    build(functions(strings), folder / meta_name)
    needs = [f"-L{folder}", *(f"-l:{name}" for name in (*weak, acl_name, meta_name))]
    build(hixl_source or functions(hixl), folder / "libcann_hixl.so", *needs, plus=hixl_source is not None)
    return folder


def child(code: str, **environment: str) -> str:
    """Run Python in a process of its own, as the libraries load once in each; what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVXFER_", "ASCEND_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
