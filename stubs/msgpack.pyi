"""The part of msgpack that kvxfer uses; the package ships no types of its own."""

from collections.abc import Callable
from typing import Any

def packb(o: object, *, use_bin_type: bool = ..., strict_types: bool = ...) -> bytes: ...
def unpackb(
    packed: bytes | bytearray | memoryview,
    *,
    raw: bool = ...,
    use_list: bool = ...,
    strict_map_key: bool = ...,
    unicode_errors: str | None = ...,
    max_buffer_size: int = ...,
    max_str_len: int = ...,
    max_bin_len: int = ...,
    max_array_len: int = ...,
    max_map_len: int = ...,
    max_ext_len: int = ...,
    ext_hook: Callable[[int, bytes], Any] = ...,
) -> Any: ...

class UnpackException(Exception): ...
class ExtraData(UnpackException, ValueError): ...
class FormatError(ValueError, UnpackException): ...
class StackError(ValueError, UnpackException): ...
class OutOfData(UnpackException): ...

class ExtType:
    code: int
    data: bytes
