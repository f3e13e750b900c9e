"""What learner and actors share on the wire: messages, their bytes, signatures, topics, errors. Touches no network."""
