"""The actor: runs int8 policies on edge hardware and sends experience back. No TensorFlow, ever."""
