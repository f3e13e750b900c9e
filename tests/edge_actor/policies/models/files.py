"""Paths of the committed models."""

from __future__ import annotations

from pathlib import Path

INT8 = Path(__file__).with_name("cartpole-int8.tflite")
FLOAT32 = Path(__file__).with_name("cartpole-float32.tflite")
