"""What `pytest bench` runs on: Qwen3-8B shapes on a GPU, a toy elsewhere."""

import pytest
import torch

from bench.shapes import SHAPES

CUDA = torch.cuda.is_available()
SHAPE = SHAPES["8b" if CUDA else "tiny"]
REQUESTS = (8, 16, 32) if CUDA else (2, 8)
CONTEXT = 1000 if CUDA else 100
ROUNDS = 20 if CUDA else 5

needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
