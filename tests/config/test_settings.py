"""Configuration: one table of options, four sources, and no bad value that passes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.addresses import Address
from kvxfer.config import CONFIG_OPTIONS, Config, load
from kvxfer.config.options import Option, format_size, nearest
from kvxfer.config.sources import SECRET_BYTES_MAX, SECRET_BYTES_MIN
from kvxfer.errors import ConfigError

SECRET = "a secret of some length"
NUMERIC = [option for option in CONFIG_OPTIONS if option.kind in ("int", "size", "seconds")]
by_name = pytest.mark.parametrize("option", CONFIG_OPTIONS, ids=lambda option: option.name)
by_number = pytest.mark.parametrize("option", NUMERIC, ids=lambda option: option.name)

# What each kind of option must refuse, in the words of a user's mistakes.
MISTAKES = ("abc", "-1", "", "9" * 39, "10 parsecs")
# Texts that are no mistake for these options.
FINE = {
    ("node_name", "abc"),
    ("node_name", ""),
    ("advertise", "abc"),
    ("advertise", ""),
    ("data_advertise", "abc"),
    ("data_advertise", ""),
    *(
        (name, "")
        for name in (
            *("http", "socket_dir", "secret", "secret_file", "data_bind", "tcp_congestion", "fault_spec"),
            *("numa_node", "engine_cpus", "ping_device", "hixl_options"),
            *("tls_cert", "tls_key", "tls_ca", "allow_nodes", "allow_namespaces", "socket_uids", "landing_devices"),
        )
    ),
    *((name, text) for name in ("namespace", "allow_namespaces") for text in ("abc", "9" * 39)),
    ("tcp_congestion", "abc"),
    ("node_name", "9" * 39),
    ("secret", "9" * 39),
    *(("secret_file", text) for text in MISTAKES),
    *((name, text) for name in ("tls_cert", "tls_key", "tls_ca", "node_keys_file") for text in MISTAKES),
    ("data_port", "0"),
}


def test_the_defaults_are_a_configuration() -> None:
    config = Config()
    config.check_security()
    assert config == load(env={}).config
    assert config.listen_address == Address("127.0.0.1", 17800)
    assert config.data_bind_host == "127.0.0.1"
    assert config.read_secrets() == ()


def test_hixl_has_a_name_that_peers_can_dial() -> None:
    assert Config().hixl_bind_host == "127.0.0.1"
    told = {"listen": "0.0.0.0:0", "advertise": ("10.0.0.1",), "secret": "0123456789abcdef"}
    assert Config(**told, data_advertise=("node-a", "10.0.0.2")).hixl_bind_host == "10.0.0.2"
    assert Config(**told).hixl_bind_host == "0.0.0.0"
    assert Config(hixl_options="RdmaTrafficClass=132;RdmaServiceLevel=4").hixl_options


def test_embedded() -> None:
    config = Config.embedded(lease_s=3)
    assert (config.listen, config.http, config.lease_s) == ("127.0.0.1:0", "", 3.0)
    assert config.http_address is None


@by_name
def test_every_option_is_documented_and_has_a_default_of_its_own_kind(option: Option) -> None:
    assert option.doc.endswith(".")
    assert option.accepted
    assert option.parse(option.default, "default") == option.default
    assert option.env == "KVXFER_" + option.name.upper()
    if option.kind in ("int", "size", "seconds"):
        assert option.min < option.max
    if option.name.endswith("_s"):
        assert option.unit == "s"
    if "bytes" in option.name.split("_"):
        assert option.unit == "bytes"


@by_name
@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:10] or "empty")
@pytest.mark.parametrize("source", ["environment", "flag", "file"])
def test_mistakes_are_refused_with_key_value_range_and_source(
    option: Option, text: str, source: str, tmp_path: Path
) -> None:
    if (option.name, text) in FINE or (option.secret and source == "flag"):
        return
    path = tmp_path / "kvxfer.toml"
    path.write_text(f'{option.name} = "{text}"\n' if source == "file" else "")
    env = {option.env: text} if source == "environment" else {}
    flags = {option.name: text} if source == "flag" else {}
    with pytest.raises(ConfigError) as caught:
        load(path, env=env, flags=flags)
    fields = caught.value.fields
    shown = str(caught.value)
    assert option.name in shown
    assert option.accepted in shown or option.secret
    assert source in str(fields["source"])
    if not option.secret:
        assert repr(text) == fields["value"]


@by_name
@pytest.mark.parametrize(
    "value",
    [None, [], {}, [1], {"a": 1}, float("nan"), float("inf"), -float("inf"), 10**5000, -1, -0.5, b"x", object()],
    ids=lambda value: type(value).__name__,
)
def test_values_of_other_types_are_refused(option: Option, value: Any) -> None:
    if value == [] and option.kind == "list" and option.empty:
        assert getattr(Config(**{option.name: value}), option.name) == ()
        return
    with pytest.raises(ConfigError) as caught:
        Config(**{option.name: value})
    assert caught.value.fields["key"] == option.name


@by_number
def test_the_ends_of_the_range_pass_and_the_next_value_does_not(option: Option) -> None:
    step = 0.001 if option.kind == "seconds" else 1
    for value in (option.min, option.max):
        assert option.parse(value if option.kind == "seconds" else int(value), "test") == value
    for value in (option.min - step, option.max + step):
        with pytest.raises(ConfigError, match="out of range"):
            option.parse(value if option.kind == "seconds" else int(value), "test")


@by_number
def test_true_is_not_one(option: Option) -> None:
    with pytest.raises(ConfigError):
        option.parse(True, "test")


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("4096B", 4096), ("8KiB", 8192), ("64MiB", 64 << 20), ("1GiB", 1 << 30), ("1 GiB", 1 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert Config(landing_bytes_max=text).landing_bytes_max == size  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["64MB", "64M", "64mib", "1.5GiB", "1e6", "0x10", "64MiB/s", " 64MiB", "６４", "MiB"])
def test_unclear_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not a size|unknown unit"):
        Config(landing_bytes_max=text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["5s", "1m", "1e3", "inf", "nan", "1,5", "5 ", "--5"])
def test_unclear_durations_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        load(env={"KVXFER_TIMEOUT_S": text})


@given(st.integers(0, 1 << 50))
def test_a_formatted_size_is_the_same_size(size: int) -> None:
    option = Option(kind="size", max=1 << 50)
    assert option.parse(format_size(size), "test") == size


@pytest.mark.parametrize(("text", "value"), [("true", True), ("NO", False), ("1", True), ("off", False)])
def test_switches(text: str, value: bool) -> None:
    assert load(env={"KVXFER_INTEGRITY": text}).config.integrity is value


def test_lists_come_from_commas_and_from_arrays(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('transports = ["tcp", "fault+shm"]\nadvertise = ["Host:9", "[::1]"]\n')
    config = load(path, env={}).config
    assert (config.transports, config.advertise) == (("tcp", "fault+shm"), ("host:9", "[::1]:0"))
    assert load(env={"KVXFER_TRANSPORTS": "tcp, shm"}).config.transports == ("tcp", "shm")


@pytest.mark.parametrize("text", ["tcp,tcp", "tpc", "fault+", "fault+fault+tcp", "tcp,,shm", "shm;tcp"])
def test_bad_transports_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        load(env={"KVXFER_TRANSPORTS": text})


def test_a_misspelt_transport_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean tcp"):
        load(env={"KVXFER_TRANSPORTS": "tpc"})


# -- sources --------------------------------------------------------------------------------------------------------


def test_flags_over_environment_over_file_over_default(tmp_path: Path) -> None:
    path = tmp_path / "kvxfer.toml"
    path.write_text("lease_s = 1\ntimeout_s = 1\nconnect_s = 1\n")
    env = {"KVXFER_CONFIG": str(path), "KVXFER_LEASE_S": "2", "KVXFER_TIMEOUT_S": "2"}
    loaded = load(env=env, flags={"lease-s": "3", "drain_s": None})
    config, origins = loaded.config, loaded.origins
    assert (config.lease_s, config.timeout_s, config.connect_s, config.drain_s) == (3, 2, 1, 5)
    assert origins["lease_s"] == "flag --lease-s"
    assert origins["timeout_s"] == "environment KVXFER_TIMEOUT_S"
    assert origins["connect_s"] == f"file {path}"
    assert origins["drain_s"] == "default"
    assert set(origins) == {option.name for option in CONFIG_OPTIONS}
    assert loaded.warnings == ()


def test_a_bad_value_is_refused_even_where_a_better_one_covers_it() -> None:
    with pytest.raises(ConfigError, match="environment KVXFER_LEASE_S"):
        load(env={"KVXFER_LEASE_S": "x"}, flags={"lease_s": 3})


def test_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "kvxfer.toml"
    path.write_text("leas_s = 1\n")
    with pytest.raises(ConfigError, match="unknown option 'leas_s'") as caught:
        load(path, env={})
    assert caught.value.hint == "did you mean lease_s?"
    assert caught.value.fields["source"] == f"file {path}"
    with pytest.raises(ConfigError, match="did you mean transports"):
        load(env={}, flags={"transport": "tcp"})
    with pytest.raises(ConfigError, match="unknown option"):
        load(env={}, flags={"zzzzzz": "tcp"})


def test_sections_and_bare_text_are_told_from_typing_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "kvxfer.toml"
    path.write_text('lease_s = 1\n[serve]\nlisten = "127.0.0.1:1"\n')
    with pytest.raises(ConfigError, match=r"\[serve\] is a section.*put the options at the top"):
        load(path, env={})
    path.write_text("listen = 127.0.0.1:1\n")
    with pytest.raises(ConfigError, match=r"line 1.*text in quotes"):
        load(path, env={})


def test_unknown_environment_variables_warn() -> None:
    ours = {"KVXFER_TEST_SLACK": "3", "KVXFER_SIM_HBM": "1G", "KVXFER_CANN_LIBDIR": "/x", "OTHER": "x"}
    loaded = load(env={"KVXFER_TRANSPORT": "tcp", "KVXFER_QQQQQQ": "1", **ours})
    assert loaded.warnings == (
        "unknown environment variable KVXFER_QQQQQQ",
        "unknown environment variable KVXFER_TRANSPORT, did you mean KVXFER_TRANSPORTS?",
    )
    assert loaded.config == Config()


@pytest.mark.parametrize(
    "content",
    [
        b"listen",
        b"\xff\xfe",
        b"a = " + b"[" * 5000,
        b"lease_s = " + b"1" * 5000,
        b"[lease_s]\na = 1",
        b"lease_s = 1\n" * 2,
    ],
    ids=lambda content: content[:9].hex(),
)
def test_a_file_that_is_no_configuration(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "kvxfer.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(path, env={})
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            load(path, env={})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_LEASE_S", "7")
    assert load().config.lease_s == 7


def test_nearest() -> None:
    assert nearest("LISTE", ["listen", "lease"]) == "listen"
    assert nearest("zzz", ["listen"]) is None


# -- values that belong together ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lease_s": 7200}, ("lease_s (7200)", "lease_s_max (3600)")),
        ({"reconnect_min_s": 6}, ("reconnect_min_s", "reconnect_max_s")),
        ({"window_bytes_max": "2GiB"}, ("window_bytes_max (2GiB)", "inflight_bytes_max (1GiB)")),
        ({"mail_bytes_max": "9MiB", "mailbox_bytes_max": "12MiB"}, ("frame_control_bytes_max", "mail_bytes_max")),
        ({"landing_prewarm_bytes": "1GiB"}, ("landing_prewarm_bytes", "landing_bytes_max")),
        ({"handshakes_max": 65, "links_max": 64}, ("handshakes_max", "links_max")),
        ({"secret": SECRET, "secret_file": "/x"}, ("secret", "secret_file")),
        ({"mailbox_bytes_max": "8MiB", "link_queue_bytes_max": "4MiB"}, ("mailbox_bytes_max", "link_queue_bytes_max")),
    ],
    ids=str,
)
def test_conflicts(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**changes)
    assert all(word in str(caught.value) for word in words)


def test_a_conflict_names_both_sources() -> None:
    with pytest.raises(ConfigError) as caught:
        load(env={"KVXFER_LEASE_S": "7200"})
    assert caught.value.fields["source"] == "lease_s: environment KVXFER_LEASE_S; lease_s_max: default"


def test_a_copy_is_validated_too() -> None:
    assert dataclasses.replace(Config(), lease_s=5).lease_s == 5.0
    with pytest.raises(ConfigError):
        dataclasses.replace(Config(), lease_s=-5)


# -- security -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.1.2.3", "[2001:db8::1]", "[::ffff:10.0.0.1]"])
@pytest.mark.parametrize("key", ["listen", "data_bind"])
def test_other_hosts_need_a_secret(key: str, host: str) -> None:
    changes: dict[str, Any] = {key: f"{host}:1" if key == "listen" else host}
    with pytest.raises(ConfigError, match="reachable from other hosts") as caught:
        Config(**changes).check_security()
    assert caught.value.fields["key"] == key
    assert "secret_file" in str(caught.value.hint)
    Config(**changes, secret=SECRET).check_security()


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "[::1]:1", "localhost:1", "127.8.0.1:0"])
def test_loopback_needs_nothing(listen: str) -> None:
    Config(listen=listen).check_security()


def test_http_needs_its_own_permission() -> None:
    config = Config(http="0.0.0.0:9100", secret=SECRET)
    with pytest.raises(ConfigError, match="no login"):
        config.check_security()
    dataclasses.replace(config, http_allow_remote=True).check_security()


@pytest.mark.parametrize("listen", ["node-7:17800", "0.0.0.0", ":17800", "*:17800", "::1:17800"])
def test_what_cannot_be_bound_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError):
        Config(listen=listen)


@pytest.mark.parametrize("size", [SECRET_BYTES_MIN, SECRET_BYTES_MAX])
def test_secret_lengths(size: int, tmp_path: Path) -> None:
    step = 1 if size == SECRET_BYTES_MAX else -1
    assert Config(secret="s" * size).read_secrets() == (b"s" * size,)
    with pytest.raises(ConfigError, match="accepted"):
        Config(secret="s" * (size + step))
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_bytes(b"f" * size + b"\n")
    assert Config(secret_file=str(path)).read_secrets() == (b"f" * size,)
    path.write_bytes(b"f" * (size + step) + b"\n")
    with pytest.raises(ConfigError, match="bytes; accepted"):
        Config(secret_file=str(path)).read_secrets()


def test_the_length_counts_bytes_not_characters() -> None:
    assert len(Config(secret="ä" * 8).read_secrets()[0]) == 16
    with pytest.raises(ConfigError):
        Config(secret="ä" * 7)


def test_a_secret_is_never_shown() -> None:
    config = Config(secret=SECRET)
    option = next(option for option in CONFIG_OPTIONS if option.name == "secret")
    assert SECRET not in repr(config) + str(config)
    assert option.show(SECRET) == "(hidden)"
    assert option.flag is None
    for env in ({"KVXFER_SECRET": "tooshort4u"}, {"KVXFER_SECRET": SECRET + "\0"}):
        with pytest.raises(ConfigError) as caught:
            load(env=env)
        assert env["KVXFER_SECRET"][:8] not in str(caught.value) + repr(caught.value.fields)
    with pytest.raises(ConfigError, match="command line"):
        load(env={}, flags={"secret": SECRET})
    assert load(env={"KVXFER_SECRET": SECRET}).config.read_secrets() == (SECRET.encode(),)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o777])
def test_a_secret_that_others_can_reach_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="others may access it") as caught:
        load(env={"KVXFER_SECRET_FILE": str(path)})
    assert caught.value.hint == f"chmod 600 {path}"
    assert "KVXFER_SECRET_FILE" in str(caught.value.fields["source"])
    path.chmod(0o400)
    assert load(env={"KVXFER_SECRET_FILE": str(path)}).config.read_secrets() == (SECRET.encode(),)


def test_a_secret_file_that_is_no_file(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path, why in (
        (fifo, "not a regular file"),
        (tmp_path, "regular|directory"),
        (tmp_path / "no", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=why):
            Config(secret_file=str(path)).read_secrets()


# -- what peers are told to dial ------------------------------------------------------------------------------------


def test_advertised_addresses() -> None:
    bound = Address("10.0.0.1", 4711)
    assert Config().advertised(bound) == (bound,)
    config = Config(advertise=("10.9.9.9", "[2001:db8::1]:5"), data_advertise=("10.9.9.8",))
    assert config.advertised(bound) == (Address("10.9.9.9", 4711), Address("2001:db8::1", 5))
    assert config.data_advertised(bound) == (Address("10.9.9.8", 4711),)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_never_advertised(host: str) -> None:
    with pytest.raises(ConfigError, match="every interface"):
        Config().advertised(Address(host, 1))
    with pytest.raises(ConfigError):
        Config(advertise=(f"[{host}]" if ":" in host else host,))
    assert Config(advertise=("node",)).advertised(Address(host, 1)) == (Address("node", 1),)


@pytest.mark.parametrize(
    ("listen", "bind", "host"),
    [
        ("localhost:1", "", "127.0.0.1"),
        ("[::1]:1", "", "::1"),
        ("127.0.0.1:1", "::1", "::1"),
        ("0.0.0.0:1", "", "0.0.0.0"),
    ],
)
def test_data_binds_where_control_listens(listen: str, bind: str, host: str) -> None:
    assert Config(listen=listen, data_bind=bind).data_bind_host == host


def test_embedded_names_an_option_that_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match=r"leese_s.*did you mean lease_s"):
        Config.embedded(leese_s=3)
