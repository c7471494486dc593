"""One control connection and how it comes about: listening, dialling, TLS and secrets, requests and their replies.

Either end of a link runs the same code. Which links a node keeps, and whom it lets in, is decided in `kvxfer.daemon`;
the bytes themselves are those of `kvxfer.wire`.
"""
