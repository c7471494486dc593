"""The configuration: every option and limit with its default, where values come from, where the daemon's socket lies.

`from kvxfer.config import Config, load` is the way in. A new option is a field of `Config` in `settings`.
"""

from kvxfer.config.settings import (
    CHANNEL_CHARS_MAX,
    CLAIM_NUMBER_MAX,
    CONFIG_OPTIONS,
    DEFAULT_NAMESPACE,
    ECHO_BYTES_MAX,
    FRAME_OVERHEAD_BYTES,
    FRAME_UNAUTHENTICATED_BYTES_MAX,
    KEY_CHARS_MAX,
    NAMESPACE_CHARS_MAX,
    POSTING_BODY_BYTES_MAX,
    SOCKET_DIR_CHARS_MAX,
    TRANSPORTS,
    Config,
    Loaded,
    load,
)

__all__ = [
    "CHANNEL_CHARS_MAX",
    "CLAIM_NUMBER_MAX",
    "CONFIG_OPTIONS",
    "DEFAULT_NAMESPACE",
    "ECHO_BYTES_MAX",
    "FRAME_OVERHEAD_BYTES",
    "FRAME_UNAUTHENTICATED_BYTES_MAX",
    "KEY_CHARS_MAX",
    "NAMESPACE_CHARS_MAX",
    "POSTING_BODY_BYTES_MAX",
    "SOCKET_DIR_CHARS_MAX",
    "TRANSPORTS",
    "Config",
    "Loaded",
    "load",
]
