# The generated extension: cffi's `ffi` and the functions of api.cdef.h. Only engine.py, status.py and ascend.py import it.
from typing import Any

ffi: Any
lib: Any
