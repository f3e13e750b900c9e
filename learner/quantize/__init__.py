"""From a policy's layers to the bytes that actors run: fold the input, convert, compare with fp32 before publishing."""
