"""What the connector uses of vLLM, for the type checker alone: vLLM is not installed where kvxfer is checked."""

__version__: str
