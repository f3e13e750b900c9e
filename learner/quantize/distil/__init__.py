"""Quantization-aware distillation: weights trained so that their int8 model acts as the original."""
