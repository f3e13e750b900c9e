"""The wire as learner and actors share it: messages, their bytes, signatures, topics, errors. Touches no network."""
