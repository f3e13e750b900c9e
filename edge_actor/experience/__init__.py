"""Steps on their way to the learner: recorded, cut into messages, kept on disk until a receipt comes."""
