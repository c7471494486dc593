# The generated extension: cffi's `ffi` and the functions of api.cdef.h, for engine.py, status.py and ascend.py alone.
from typing import Any

ffi: Any
lib: Any
