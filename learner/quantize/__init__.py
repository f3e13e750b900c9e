"""Quantization: makes the bytes that actors run of a policy's layers, and compares them with fp32 before publishing."""
