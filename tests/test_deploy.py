"""The files of deploy/ agree with the program: ports, paths, probes, grace periods, options, metric names."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tomllib
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvxfer import errors
from kvxfer.addresses import parse_address
from kvxfer.config import CONFIG_OPTIONS, Config, load
from kvxfer.config.paths import SOCKET_NAME
from kvxfer.daemon import landing, settling
from kvxfer.doctor.ascend import CONTROL_FILES, HCCN_CONF
from kvxfer.net import link
from kvxfer.server import Server
from tests.system import needs
from tools import example_config

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
CONFIG = Config()
CONTROL_PORT = CONFIG.listen_address.port
HTTP_PORT = CONFIG.http_address.port if CONFIG.http_address else 0
ENDPOINTS = {"/healthz", "/readyz", "/metrics"}
USER_ID = 10001


def seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+)(ms|s|min)?", text)
    assert match, text
    return int(match[1]) * {"ms": 0.001, "s": 1, "min": 60, None: 1}[match[2]]


# -- kvxfer.toml ------------------------------------------------------------------------------------------------------


def test_example_configuration_is_fresh() -> None:
    assert (DEPLOY / "kvxfer.toml").read_text(encoding="utf-8") == example_config.render()


def test_example_configuration_loads_as_it_is_and_with_every_line_active(tmp_path: Path) -> None:
    text = (DEPLOY / "kvxfer.toml").read_text(encoding="utf-8")
    active = re.sub(r"^#(?=[a-z_]+ = )", "", text, flags=re.MULTILINE)
    assert set(tomllib.loads(active)) == {option.name for option in CONFIG_OPTIONS}
    assert tomllib.loads(text) == {}
    for content in (text, active):
        path = tmp_path / "kvxfer.toml"
        path.write_text(content, encoding="utf-8")
        assert load(path, env={}).config == CONFIG


# -- systemd ----------------------------------------------------------------------------------------------------------


ON_CARDS = "kvxfer.service.d/ascend.conf"


def unit(name: str = "kvxfer.service") -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / name).read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = found.setdefault(match[1], {})
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            section.setdefault(key, []).append(value)
    return found


@needs("systemd-analyze")
@pytest.mark.parametrize("drop_in", [None, ON_CARDS])
def test_systemd_accepts_the_unit(drop_in: str | None, tmp_path: Path) -> None:
    if drop_in is not None:
        (tmp_path / drop_in).parent.mkdir()
        shutil.copy(DEPLOY / "systemd" / drop_in, tmp_path / drop_in)
    text = (DEPLOY / "systemd" / "kvxfer.service").read_text(encoding="utf-8")
    path = tmp_path / "kvxfer.service"  # with a program that exists here
    path.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE), encoding="utf-8")
    run = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0
    about_us = [line for line in run.stderr.splitlines() if "kvxfer" in line]
    assert about_us == []


def test_the_drop_in_for_cards_starts_the_same_and_lets_them_in() -> None:
    service, [start] = unit(ON_CARDS)["Service"], unit()["Service"]["ExecStart"]
    cleared, with_toolkit = service["ExecStart"]
    assert cleared == ""
    assert with_toolkit.endswith(f"set_env.sh && exec {start}'")
    assert (unit()["Service"]["PrivateDevices"], service["PrivateDevices"]) == (["yes"], ["no"])
    assert f"ASCEND_PROCESS_LOG_PATH=/var/log/{service['LogsDirectory'][0]}" in service["Environment"]


def test_unit_agrees_with_the_program() -> None:
    service = unit()["Service"]
    [start] = service["ExecStart"]
    assert start.split()[1:] == ["serve", "--config", "/etc/kvxfer/kvxfer.toml"]
    [runtime] = service["RuntimeDirectory"]
    assert f"KVXFER_SOCKET_DIR=/run/{runtime}" in service["Environment"]
    assert service["RuntimeDirectoryMode"] == ["0700"], "the daemon refuses a directory that others may enter"
    assert seconds(service["TimeoutStopSec"][0]) > CONFIG.drain_s + CONFIG.cancel_s
    assert service["KillSignal"] == ["SIGTERM"]
    assert service["LimitMEMLOCK"] == ["infinity"]
    assert int(service["LimitNOFILE"][0]) >= 4 * (CONFIG.links_max + CONFIG.workers_max) + CONFIG.accepted_max
    assert "PrivateUsers" not in service, "hides the user ids that the Unix socket checks"
    assert "ProcSubset" not in service, "hides the boot id"
    assert {"AF_UNIX", "AF_INET", "AF_INET6"} <= set(service["RestrictAddressFamilies"][0].split())


def test_unit_names_only_environment_that_is_an_option() -> None:
    known = {option.env for option in CONFIG_OPTIONS} | {"XDG_RUNTIME_DIR"}  # where the user's secret lies
    for entry in unit()["Service"]["Environment"]:
        assert entry.partition("=")[0] in known


# -- image ------------------------------------------------------------------------------------------------------------

INSTRUCTIONS = {
    "ARG", "FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD",
}  # fmt: skip
IMAGES = ("Dockerfile", "Dockerfile.ascend")


def dockerfile(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) in order, continued lines joined, arguments of the build replaced by their defaults."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    for name, value in re.findall(r"^ARG (\w+)=(\S+)$", joined, re.MULTILINE):
        joined = joined.replace(f"${{{name}}}", value)
    parts = [tuple(line.split(None, 1)) for line in joined.splitlines()]
    assert all(len(part) == 2 for part in parts), parts
    return [(part[0], part[1]) for part in parts]


@dataclass(frozen=True)
class Image:
    """A Dockerfile, read."""

    steps: list[tuple[str, str]]

    def values(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> Image:
    return Image(dockerfile((DEPLOY / request.param).read_text(encoding="utf-8")))


def test_dockerfile_is_made_of_known_instructions(image: Image) -> None:
    assert {name for name, _ in image.steps} <= INSTRUCTIONS
    assert image.steps[0][0] in ("FROM", "ARG")


def test_dockerfile_has_pinned_bases_and_ends_without_root(image: Image) -> None:
    for base in image.values("FROM"):
        name = base.split()[0]
        assert re.fullmatch(r"[a-z0-9./-]+:[A-Za-z0-9._-]+", name), f"{name} has no tag"
        assert not name.endswith(":latest")
    last_stage = max(index for index, (name, _) in enumerate(image.steps) if name == "FROM")
    users = [rest for name, rest in image.steps[last_stage:] if name == "USER"]
    assert users[-1] == f"{USER_ID}:{USER_ID}"
    assert not any(name == "RUN" for name, _ in image.steps[last_stage:][2:]), (
        "what the image runs is made as root, once"
    )


def test_dockerfile_copies_what_exists_and_what_the_context_holds(image: Image) -> None:
    context = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    stages = [rest.split()[-1] for rest in image.values("FROM") if " AS " in rest]
    copied = set()
    for rest in image.values("COPY"):
        words = rest.split()
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in context, f"{source} is not in the build context"
            copied.add(source)
    assert {"kvxfer", "requirements", "pyproject.toml", "setup.py", "LICENSE", "README.md"} == copied


def test_image_has_the_compilers_that_the_engine_needs(image: Image) -> None:
    """The engine is C and C++: without g++ the build stage would stop after its long first part."""
    installed = " ".join(image.values("RUN"))
    assert {"gcc", "g++", "libc6-dev"} <= set(installed.split())


def test_image_agrees_with_the_program(image: Image) -> None:
    known = {option.env for option in CONFIG_OPTIONS}
    [environment] = image.values("ENV")
    names = {word.partition("=")[0] for word in environment.split()}
    assert {name for name in names if name.startswith("KVXFER_")} <= known
    assert {int(port) for port in image.values("EXPOSE")} == {CONTROL_PORT, HTTP_PORT}
    [check] = image.values("HEALTHCHECK")
    assert f"127.0.0.1:{HTTP_PORT}" in check
    assert "/healthz" in check
    assert image.values("STOPSIGNAL") == ["SIGTERM"]
    [entry] = image.values("ENTRYPOINT")
    assert yaml.safe_load(entry)[-1] == "kvxfer"
    assert image.values("CMD") == ['["serve"]']


def test_the_health_check_is_a_program(image: Image) -> None:
    """It fails when nobody answers, and not because it cannot be run."""
    [check] = image.values("HEALTHCHECK")
    command = yaml.safe_load(check.partition("CMD")[2])
    assert command[0] == "python"
    environment = {"KVXFER_HTTP": "127.0.0.1:1"}
    run = subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "Connection refused" in run.stderr


def test_the_entry_of_the_ascend_image_passes_its_arguments_on(tmp_path: Path) -> None:
    """With the toolkit's environment, and without one."""
    image = Image(dockerfile((DEPLOY / "Dockerfile.ascend").read_text(encoding="utf-8")))
    [bash, flag, script, name] = yaml.safe_load(image.values("ENTRYPOINT")[0])
    stand_in = tmp_path / "kvxfer"
    stand_in.write_text('#!/bin/sh\necho "$TOOLKIT" "$@"\n')
    stand_in.chmod(0o755)
    toolkit = tmp_path / "set_env.sh"
    toolkit.write_text("export TOOLKIT=sourced\n")

    def run(text: str) -> str:
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        command = [bash, flag, text, name, "ping", "a b"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert run(script.replace("/usr/local/Ascend", str(tmp_path / "none"))) == " ping a b\n"
    assert run(script.replace("/usr/local/Ascend/cann/set_env.sh", str(toolkit))) == "sourced ping a b\n"


def test_the_ascend_image_mounts_what_doctor_looks_for() -> None:
    shown = (DEPLOY / "Dockerfile.ascend").read_text(encoding="utf-8")
    for name in (*CONTROL_FILES, HCCN_CONF, "/usr/local/Ascend/driver"):
        assert name in shown


# -- Kubernetes -------------------------------------------------------------------------------------------------------


# How a list is merged: by the key that tells its items apart. Lists that are not here are replaced as a whole.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
}


def merged(base: Any, patch: Any, name: str = "") -> Any:
    """A strategic merge patch, as `kubectl patch` applies it to these kinds."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base.get(key), value, key) for key, value in patch.items()}
    if isinstance(base, list) and isinstance(patch, list) and name in MERGE_KEYS:
        key = MERGE_KEYS[name]
        found = {item[key]: item for item in base}
        return list((found | {item[key]: merged(found.get(item[key]), item) for item in patch}).values())
    return deepcopy(patch)


def ordered(value: Any, name: str = "") -> Any:
    """Without the order of lists whose items have a key."""
    if isinstance(value, dict):
        return {key: ordered(item, key) for key, item in value.items()}
    if isinstance(value, list):
        items = [ordered(item) for item in value]
        return sorted(items, key=lambda item: item[MERGE_KEYS[name]]) if name in MERGE_KEYS else items
    return value


def daemon_set(*patches: str) -> dict[str, Any]:
    [found] = yaml.safe_load_all((DEPLOY / "kubernetes" / "daemonset.yaml").read_text(encoding="utf-8"))
    for name in patches:
        found = merged(found, yaml.safe_load((DEPLOY / "kubernetes" / name).read_text(encoding="utf-8")))
    assert (found["apiVersion"], found["kind"]) == ("apps/v1", "DaemonSet")
    return dict(found)


@pytest.fixture(scope="module", params=[(), ("ascend.patch.yaml",)], ids=["plain", "ascend"])
def pod(request: pytest.FixtureRequest) -> dict[str, Any]:
    found = daemon_set(*request.param)
    template = found["spec"]["template"]
    assert found["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    spec: dict[str, Any] = template["spec"]
    return spec


def test_the_ascend_patch_adds_what_doctor_looks_for() -> None:
    plain, ascend = (daemon_set(*patches)["spec"]["template"]["spec"] for patches in ((), ("ascend.patch.yaml",)))
    volumes = {volume["name"]: volume for volume in ascend["volumes"]}
    assert {volume["name"] for volume in plain["volumes"]} < set(volumes)
    mounts = {mount["mountPath"]: mount for mount in ascend["containers"][0]["volumeMounts"]}
    for path in (HCCN_CONF, "/usr/local/Ascend/driver"):
        assert volumes[mounts[path]["name"]]["hostPath"]["path"] == path
        assert mounts[path]["readOnly"]
    environment = {entry["name"]: entry.get("value") for entry in ascend["containers"][0]["env"]}
    assert environment["KVXFER_TRANSPORTS"] == "hixl,shm,tcp"
    assert "ASCEND_VISIBLE_DEVICES" in environment
    assert ascend["containers"][0]["image"].startswith("kvxfer-ascend:")
    assert "resources" not in yaml.safe_load((DEPLOY / "kubernetes" / "ascend.patch.yaml").read_text())["spec"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_merges_the_patch_as_these_tests_do() -> None:
    folder = DEPLOY / "kubernetes"
    files = ["-f", str(folder / "daemonset.yaml"), "--patch-file", str(folder / "ascend.patch.yaml")]
    command = ["kubectl", "patch", "--local", *files, "-o", "yaml"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ordered(yaml.safe_load(run.stdout)["spec"]) == ordered(daemon_set("ascend.patch.yaml")["spec"])


def pod_config(pod: dict[str, Any], tmp_path: Path) -> Config:
    """The configuration that the daemon in the pod would load."""
    values = {entry["name"]: str(entry.get("value", "")) for entry in pod["containers"][0]["env"]}
    values |= {"HOST_IP": "192.0.2.7", "KVXFER_NODE_NAME": "node-a"}
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n", encoding="utf-8")
    secret.chmod(0o400)
    expanded = {key: value.replace("$(HOST_IP)", values["HOST_IP"]) for key, value in values.items()}
    assert expanded["KVXFER_SECRET_FILE"] == "/private/secret"
    expanded["KVXFER_SECRET_FILE"] = str(secret)
    loaded = load(env=expanded)
    assert loaded.warnings == ()
    loaded.config.check_security()
    return loaded.config


def test_daemon_set_configures_a_daemon_that_starts(pod: dict[str, Any], tmp_path: Path) -> None:
    config = pod_config(pod, tmp_path)
    container = pod["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.http_address is not None
    assert ports == {"control": CONTROL_PORT, "http": HTTP_PORT, "data": config.data_port}
    assert (config.listen_address.port, config.http_address.port) == (ports["control"], ports["http"])
    assert container["args"] == ["serve"]


def test_daemon_set_probes_real_endpoints(pod: dict[str, Any]) -> None:
    container = pod["containers"][0]
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz"), ("startupProbe", "/healthz")):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
        assert path in ENDPOINTS


def test_daemon_set_gives_time_to_drain(pod: dict[str, Any], tmp_path: Path) -> None:
    config = pod_config(pod, tmp_path)
    assert pod["terminationGracePeriodSeconds"] > config.drain_s + config.cancel_s


def test_daemon_set_mounts_what_the_daemon_needs(pod: dict[str, Any], tmp_path: Path) -> None:
    config = pod_config(pod, tmp_path)
    container, [init] = pod["containers"][0], pod["initContainers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) | {mount["name"] for mount in init["volumeMounts"]} == set(volumes)
    assert volumes[mounts[config.socket_dir]]["hostPath"]["path"] == config.socket_dir
    assert len(f"{config.socket_dir}/{SOCKET_NAME}") < 108
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "sizeLimit" in volumes[mounts["/dev/shm"]]["emptyDir"]
    script = init["command"][-1]
    assert f"chmod 0700 {config.socket_dir}" in script
    assert f"-m 0400 -o {USER_ID} -g {USER_ID} /secret/secret /private/secret" in script


def test_daemon_set_is_confined(pod: dict[str, Any], tmp_path: Path) -> None:
    container = pod["containers"][0]
    context = container["securityContext"]
    assert (context["runAsUser"], context["runAsNonRoot"]) == (USER_ID, True)
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert not container["image"].endswith(":latest")
    assert pod["initContainers"][0]["image"] == daemon_set()["spec"]["template"]["spec"]["containers"][0]["image"]


# What each option of a size means for the memory of the daemon: of these it holds so much at the same time ...
HELD = ("landing_bytes_max", "posting_bytes_max", "mailboxes_bytes_max", "link_queues_bytes_max")
# ... and these are a part of those, of one message, of what is in flight between workers, or of an accelerator.
NOT_HELD = {
    *(
        "link_queue_bytes_max",
        "mailbox_bytes_max",
        "mail_bytes_max",
        "frame_control_bytes_max",
        "landing_prewarm_bytes",
    ),
    *("window_bytes_max", "inflight_bytes_max", "frame_bytes", "chunk_bytes", "inline_bytes_max", "nt_bytes_min"),
    *("hbm_arena_bytes", "pinned_arena_bytes"),
}
PROCESS_BYTES = 160 << 20  # the interpreter, the engine's threads, and the entries of full tables beside their bodies


def mebibytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)Mi", text)
    assert found, text
    return int(found[1]) << 20


def held_bytes(config: Config) -> int:
    """What a daemon holds when everything that it bounds is full."""
    unfinished = max(link.UNFINISHED_BYTES_MAX, link.NODE_QUEUES * config.frame_control_bytes_max)
    constant = landing.BODIES_BYTES_MAX + settling.QUESTIONS_BYTES_MAX + unfinished
    return sum(int(getattr(config, name)) for name in HELD) + constant + PROCESS_BYTES


def test_every_size_is_known_to_be_held_or_not() -> None:
    sizes = {option.name for option in CONFIG_OPTIONS if option.kind == "size"}
    assert sizes == NOT_HELD | set(HELD), "say in HELD or NOT_HELD what the new option means for the memory limit"


def test_the_memory_limit_is_what_may_be_full_at_once(pod: dict[str, Any], tmp_path: Path) -> None:
    """Not less, or the OOM killer comes before the typed errors; and not much more."""
    [container], volumes = pod["containers"], {volume["name"]: volume for volume in pod["volumes"]}
    needed = held_bytes(pod_config(pod, tmp_path))
    for mount in container["volumeMounts"]:
        place = volumes[mount["name"]].get("emptyDir", {})
        needed += mebibytes(place["sizeLimit"]) if place.get("medium") == "Memory" else 0
    limit = mebibytes(container["resources"]["limits"]["memory"])
    assert needed <= limit <= 1.25 * needed, f"{needed >> 20} MiB"
    assert mebibytes(container["resources"]["requests"]["memory"]) > CONFIG.landing_bytes_max


def test_the_unit_names_a_memory_limit_that_holds_the_defaults() -> None:
    text = (DEPLOY / "systemd" / "kvxfer.service").read_text(encoding="utf-8")
    [named] = re.findall(r"^#MemoryMax=([0-9]+)M$", text, re.MULTILINE)
    assert held_bytes(CONFIG) <= int(named) << 20 <= 1.25 * held_bytes(CONFIG)


# -- Prometheus -------------------------------------------------------------------------------------------------------


def test_prometheus_scrapes_the_default_address() -> None:
    settings = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in settings["scrape_configs"]}
    assert jobs["kvxfer"]["static_configs"] == [{"targets": [CONFIG.http]}]
    assert jobs["kvxfer"]["metrics_path"] in ENDPOINTS
    for name in settings["rule_files"]:
        assert (DEPLOY / "prometheus" / name).is_file()


async def scraped_names(tmp_path: Path) -> set[str]:
    """Every metric that a daemon exports from its first moment on."""
    config = Config.embedded(http="127.0.0.1:0", socket_dir=str(tmp_path / "run"), transports=("tcp",))
    async with Server(config) as server:
        address = parse_address(server.http_address)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(10):
            text = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


async def test_alerts_speak_of_metrics_that_exist(tmp_path: Path) -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "kvxfer.rules.yml").read_text(encoding="utf-8"))
    exported = await scraped_names(tmp_path)
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len({alert["alert"] for alert in alerts}) == len(alerts)
    for alert in alerts:
        named = set(re.findall(r"\b(?:kvxfer_\w+|up)\b", alert["expr"]))
        assert named, alert["alert"]
        assert named - {"up"} <= exported, alert["alert"]
        assert alert["annotations"]["summary"]
        assert alert["labels"]["severity"] in ("warning", "critical")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules() -> None:
    command = ["promtool", "check", "rules", str(DEPLOY / "prometheus" / "kvxfer.rules.yml")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_operations_page_names_errors_and_options_that_exist() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+)`", text))
    options = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)(?: = [^`]*)?`", text))
    outside = {"max_map_count", "ptrace_scope"}
    assert {name for name in named if name.endswith(("Error", "Lost", "Transfer", "Expired", "Unreachable"))} <= set(
        vars(errors)
    )
    assert options - outside <= {option.name for option in CONFIG_OPTIONS}
