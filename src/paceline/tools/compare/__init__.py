"""One script under several strategies, run one after another and shown side by side."""
