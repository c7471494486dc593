"""iperf3 over loopback, without any kvxfer in it: how fast sockets move bytes that nobody looks at.

Only W2 (one connection) and W6 (one per stream) make sense. Its receiver counts bytes and does not look at them;
``verified`` therefore counts connections whose bytes all arrived. The variant ``reno`` asks for that congestion
control.
"""

import json
import signal
import socket
import subprocess
import sys
import time

from common import GIB, LIMIT_S, MIB, arguments, die_with_parent, now, output

START_S = 5.0


def listening(server, port):
    """Wait until the server listens, without connecting: it serves one client."""
    end = now() + START_S
    while now() < end and server.poll() is None:
        with open("/proc/net/tcp", encoding="ascii") as table:
            if any(f":{port:04X} 00000000:0000 0A" in line for line in table):
                return
        time.sleep(0.01)
    sys.exit("iperf3 did not start")


def main():
    """One measurement."""
    opts = arguments("iperf3", ("host", "reno"), ("write",))
    if opts.workload not in ("w2", "w6"):
        sys.exit("iperf3 has only w2 and w6")
    signal.alarm(LIMIT_S)
    streams = opts.sizes.streams if opts.workload == "w6" else 1
    repeats = opts.sizes.stream_repeats if opts.workload == "w6" else opts.sizes.repeats
    total = repeats * (streams * opts.sizes.stream_bytes if opts.workload == "w6" else opts.sizes.large_bytes)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    command = ["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent)
    listening(server, port)
    command = ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-J", "-n", str(total), "-l", str(MIB)]
    command += ["-P", str(streams)] + (["-C", "reno"] if opts.variant == "reno" else [])
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    if "error" in report:
        server.terminate()
        sys.exit(report["error"])
    server.wait()
    received = report["end"]["sum_received"]
    used = report["end"]["cpu_utilization_percent"]
    cpu_s = (used["host_total"] + used["remote_total"]) / 100 * received["seconds"]
    found = {"GBps": received["bytes"] / received["seconds"] / 1e9, "cpu_s_per_GiB": cpu_s * GIB / received["bytes"]}
    output(opts, "iperf3", {"write": found}, streams)


if __name__ == "__main__":
    main()
