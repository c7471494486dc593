# The generated extension: cffi's `ffi` and the functions of api.cdef.h. Only engine.py and status.py look at it.
from typing import Any

ffi: Any
lib: Any
