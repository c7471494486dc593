"""The control protocol, pure: frames, messages and what is legal when, and the tags of notices on the data path.

No sockets, no clocks: bytes and `now` come in, messages and bytes go out. Links that carry it are in `kvxfer.net`.
"""
