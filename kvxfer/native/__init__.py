"""The engine: a core and transports in C, and the one door to them from Python (`engine`).

What Python calls is declared in `api.cdef.h`; what a transport must do is written beside each slot in `transport.h`.
"""
