"""Memory: what counts as such, where it is allocated, how it is registered, and which blocks of it are in use."""
