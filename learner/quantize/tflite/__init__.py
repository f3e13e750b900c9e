"""TFLite files: made by the converter, or by writing a policy's numbers into a converted one; edited and run."""
