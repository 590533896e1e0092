"""DScale decodes Hugging Face causal language models faster, token for token the same.

docs/design.md, "Layout", lists the files in the order in which a request meets them."""

from dscale import demo
from dscale.attach import attach, generate
from dscale.attachment import Attachment
from dscale.config import EngineConfig
from dscale.engine import Engine
from dscale.stats import Stats

__version__ = "0.1.0"
__all__ = ["Attachment", "Engine", "EngineConfig", "Stats", "attach", "demo", "generate"]
