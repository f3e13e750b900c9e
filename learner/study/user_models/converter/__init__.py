"""The way of any Keras model: TFLiteConverter, with what it cannot do rewritten before."""
