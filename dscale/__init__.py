"""DScale decodes Hugging Face causal language models faster, token for token the same."""

__version__ = "0.1.0"
